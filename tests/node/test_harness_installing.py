"""Installing agent programs, listing them, and probing whether they ask the model: with npm stand-ins and real ones."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from polar.cli import harness as commands
from polar.cli.mistake import UserMistake
from polar.harnesses import HARNESSES, HarnessError, codex
from polar.harnesses.harness import Preset
from polar.harnesses.installing import REQUIREMENTS, install
from polar.harnesses.packages import NODE, NpmPackage, PipPackage, executable, installed, located, version
from polar.harnesses.probe import DIALECTS, probe
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import Program
from schemas.tasks import RuntimeSpec

PACKAGE = NpmPackage(package="@x/agent", version="1.2.3", binary="node_modules/.bin/agent", node=False)
NPM = """#!/bin/bash
echo "$@" >> {log}
[ -e {broken} ] && {{ echo "no network" >&2; exit 1; }}
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/node_modules/@x/agent" "$2/node_modules/.bin"
echo '{{"version": "1.2.3"}}' > "$2/node_modules/@x/agent/package.json"
touch "$2/node_modules/.bin/agent"
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty harness folder, and an npm that puts @x/agent 1.2.3 where it is told, or fails while a file is there."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM.format(log=tmp_path / "npm.log", broken=tmp_path / "broken"))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path / "harnesses"))
    return tmp_path / "harnesses"


def test_the_pinned_version_takes_the_place_of_another_one(folder):
    manifest = folder / "agent" / "node_modules" / "@x" / "agent" / "package.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"version": "1.0.0"}')
    assert version("agent", PACKAGE) == "1.0.0" and not installed("agent", PACKAGE)
    install("agent", PACKAGE)
    assert installed("agent", PACKAGE)
    assert "@x/agent@1.2.3" in (folder.parent / "npm.log").read_text()
    assert [path.name for path in folder.iterdir()] == ["agent"], "no draft stays"


def test_a_failed_install_leaves_what_was_there(folder):
    install("agent", PACKAGE)
    (folder.parent / "broken").touch()
    with pytest.raises(HarnessError, match=r"harness agent: npm install .*no network") as error:
        install("agent", PACKAGE)
    assert "\n" not in str(error.value)
    assert installed("agent", PACKAGE)
    assert [path.name for path in folder.iterdir()] == ["agent"]


def test_without_npm_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(HarnessError, match="npm is not in PATH"):
        install("agent", PACKAGE)


def test_the_architecture_in_a_path_is_found(folder):
    place = folder / "codex" / "node_modules" / "@openai"
    (place / "codex").mkdir(parents=True)
    (place / "codex" / "package.json").write_text(json.dumps({"version": codex.PACKAGE.version}))
    with pytest.raises(HarnessError, match="is missing"):
        executable("codex", codex.PACKAGE)
    binary = place / "codex-linux-arm64" / "vendor" / "aarch64-unknown-linux-musl" / "bin" / "codex"
    binary.parent.mkdir(parents=True)
    binary.touch()
    assert executable("codex", codex.PACKAGE) == binary
    where = located("codex", codex.PACKAGE)
    assert where.argv == [f"/polar/codex/{binary.relative_to(folder / 'codex')}"]
    assert [(mount.source, mount.target) for mount in where.mounts] == [(folder / "codex", "/polar/codex")]


def test_pip_programs_pin_everything_and_every_preset_says_how_to_be_installed():
    for name, preset in HARNESSES.items():
        if isinstance(preset.package, PipPackage):
            lines = (REQUIREMENTS / preset.package.requirements).read_text().splitlines()
            pins = [line for line in lines if line and not line.startswith("#")]
            assert all("==" in pin or " @ " in pin for pin in pins), name
            assert any(pin.lower().startswith(f"{preset.package.package}=={preset.package.version}") for pin in pins)
        assert preset.package is not None or name in ("shell", "custom")


@pytest.mark.parametrize("name", sorted(name for name, preset in HARNESSES.items() if preset.package))
def test_what_make_setup_installs_is_here_as_pinned(name):
    assert installed(name, HARNESSES[name].package), f"run make setup: {name}"


def test_list_names_each_preset_and_what_is_missing(folder):
    said = CliRunner().invoke(commands.app, ["list"]).stdout
    rows = {line.split()[0]: line for line in said.splitlines() if line.split()}
    assert set(HARNESSES) <= set(rows)
    assert " no " in rows["codex"] and "openai.responses" in rows["codex"] and codex.PACKAGE.version in rows["codex"]


def test_install_takes_names_or_all_and_does_nothing_twice(folder, monkeypatch):
    preset = Preset(program=HARNESSES["shell"].program, checked=HARNESSES["shell"].checked, dialects=("openai.chat",))
    monkeypatch.setattr(
        commands, "HARNESSES", {"agent": Preset(**{**_fields(preset), "package": PACKAGE}), "sh": preset}
    )
    for arguments, message in ([], "which ones"), (["agent", "--all"], "which ones"), (["nobody"], "unknown"):
        assert message in str(CliRunner().invoke(commands.app, ["install", *arguments]).exception)
    first = CliRunner().invoke(commands.app, ["install", "agent", "sh"])
    assert "@x/agent 1.2.3 installed in" in first.stdout and "sh: nothing to install" in first.stdout
    again = CliRunner().invoke(commands.app, ["install", "--all"])
    assert again.stdout == "agent: @x/agent 1.2.3 is there\n"
    assert len((folder.parent / "npm.log").read_text().splitlines()) == 1


def _fields(preset):
    return {name: getattr(preset, name) for name in preset.__struct_fields__}


@pytest.mark.parametrize("name", ["codex", "claude_code"])
def test_check_finds_that_a_program_asks_the_model(name):
    said = CliRunner().invoke(commands.app, ["check", name])
    assert said.exit_code == 0, said.exception
    installed_line, starts, asks = said.stdout.splitlines()
    assert HARNESSES[name].package.version in installed_line and HARNESSES[name].package.version in starts
    assert asks.startswith("asks a model  POST /s/probe/v1/") and HARNESSES[name].dialects[0] in asks


def test_check_says_what_is_not_installed(folder):
    error = CliRunner().invoke(commands.app, ["check", "codex"]).exception
    assert isinstance(error, UserMistake) and "polar harness install codex" in str(error)


async def test_the_probe_tells_a_wrong_path_and_a_silent_program(tmp_path):
    def asking(command):
        def program(options, instruction, root):
            return Program(argv=["bash", "-c", command], environment={"ROOT": root})

        return Preset(program=program, checked=HARNESSES["shell"].checked, dialects=("openai.chat",))

    post = "import os,urllib.request; urllib.request.urlopen(os.environ['ROOT'] + '%s', b'{}')"
    sandbox = await LocalRuntime(tmp_path / "sessions", hidden=[]).create("s", RuntimeSpec())
    try:
        wrong = asking(f'python3 -c "{post % "/v1/messages"}"')
        with pytest.raises(HarnessError, match=r"no call in openai.chat arrived: .*POST /s/probe/v1/messages"):
            await probe("x", wrong, sandbox, 20)
        with pytest.raises(HarnessError, match="exit code 3; it asked for nothing; it said: oh no"):
            await probe("x", asking("echo oh no >&2; exit 3"), sandbox, 20)
        right = asking(f'python3 -c "{post % "/v1//chat/completions"}"; sleep 60')
        (call,) = await probe("x", right, sandbox, 20)
        assert (call.method, call.path, call.dialect) == ("POST", "/s/probe/v1/chat/completions", "openai.chat")
    finally:
        await sandbox.close()
    assert {dialect for preset in HARNESSES.values() for dialect in preset.dialects} == set(DIALECTS)


def test_node_is_the_one_that_agent_programs_run_on(tmp_path, monkeypatch):
    assert installed("node", NODE)
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path))
    assert not installed("node", NODE)
    assert shutil.which("npm"), "make setup needs it"
