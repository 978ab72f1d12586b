"""Qwen Code, OpenCode, mini-SWE-agent, Aider and custom harnesses: for real in a sandbox, and what they are given."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import stand_in_model
from aiohttp import web
from harness_scripts import SCRIPTS

from polar.harnesses import HarnessError, aider, custom, mini_swe_agent, opencode, program, qwen_code
from polar.harnesses.packages import Located
from polar.harnesses.venvs import located_module
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import Program
from schemas.tasks import HarnessSpec, RuntimeSpec

NAMES = ["qwen_code", "opencode", "mini_swe_agent", "aider"]
ROOT = "http://gateway.invalid/s/token"
ODD = (
    "/help --x @secret.txt !{id} @{secret.txt} {{args}} {{ 7*7 }} {% raw %} $& $$ $1\n\n  'q' \\n ü 😀 https://x.y/\n/x"
)
PROMPT = "Be {{ 7*7 }} {% endraw %} \"q\" 'q' ü 😀\n\\n}} end"
HOSTILE = {
    "secret.txt": "SECRET",
    ".env": "OPENAI_BASE_URL=http://127.0.0.1:1/v1\nOPENAI_API_BASE=http://127.0.0.1:1/v1\nOPENAI_MODEL=other\n",
    "mini.yaml": "agent: {}",
    "litellm.py": "raise SystemExit(9)",
    ".aider.conf.yml": "model: openai/other\nopenai-api-base: http://127.0.0.1:1/v1\n",
    ".qwen/settings.json": '{"model": {"name": "other"}, "env": {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}}',
    "opencode.json": '{"model": "local/other", "provider": {"local": {"options": {"baseURL": "http://127.0.0.1:1"}}}}',
}
"""Files in a task's work folder that would lead a program elsewhere, if it read them."""
USAGE = {"prompt_tokens": 200_000, "completion_tokens": 5, "total_tokens": 200_005}
"""Where programs that believe in a window of their own would compact."""


class Scripted(stand_in_model.StandIn):
    """Says the turns of a script, one a call, over Chat Completions; the last one for ever."""

    def __init__(self, turns):
        super().__init__({})
        self.turns = turns

    async def answer(self, request):
        if request.path != "/s/token/v1/chat/completions":
            return await super().answer(request)
        body = await request.json()
        turn = self.turns[min(len(self.requests), len(self.turns) - 1)]
        self.requests.append((request.path, body))
        message, reason = {"role": "assistant", "content": turn["content"]}, "stop"
        if turn["tool_calls"]:
            reason = "tool_calls"
            message["tool_calls"] = [
                {"index": index, "id": f"call-{len(self.requests)}-{index}", "type": "function", "function": function}
                for index, call in enumerate(turn["tool_calls"])
                for function in [{"name": call["name"], "arguments": json.dumps(call["arguments"])}]
            ]
        about = {"id": "x", "model": "policy", "created": 1, "usage": USAGE}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**about, "object": "chat.completion", "choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for choice in ({"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": reason}):
            chunk = {**about, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def run(tmp_path, name, options):
    """The program's end, the model, and the work folder's files, after a run against the preset's script."""
    box = await LocalRuntime(tmp_path / "sessions", hidden=[tmp_path]).create("s", RuntimeSpec(files=HOSTILE))
    try:
        async with stand_in_model.serving(Scripted(SCRIPTS[name])) as model:
            ended = await box.run(program(HarnessSpec(name=name, options=options), ODD, model.root), 200)
        return ended, model, {path.name: path.read_text() for path in box.work.iterdir() if path.is_file()}
    finally:
        await box.close()


@pytest.mark.parametrize("name", NAMES)
async def test_each_program_does_the_task_whatever_the_instruction_and_the_work_folder_say(tmp_path, name):
    options = {"max_tokens": 777} | ({"system_prompt": PROMPT} if name == "mini_swe_agent" else {})
    ended, model, work = await run(tmp_path, name, options)
    assert (ended.exit_code, work.pop("hello.txt", "").strip()) == (0, "hello"), ended
    assert work == {file: text for file, text in HOSTILE.items() if "/" not in file}, "it leaves nothing of its own"
    bodies = [body for _, body in model.requests]
    assert (len(bodies), model.others) == (len(SCRIPTS[name]), []), "one call a turn, and none beside them"
    assert {(body["model"], body["max_tokens"]) for body in bodies} == {("policy", 777)}
    for earlier, later in pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert later["tools"] == earlier["tools"]
    assert any(ODD in text for text in said_by_the_user(bodies[0]))
    assert "SECRET" not in json.dumps(bodies)
    if "system_prompt" in options:
        assert bodies[0]["messages"][0] == {"role": "system", "content": PROMPT}


def said_by_the_user(body):
    contents = [message["content"] for message in body["messages"] if message["role"] == "user"]
    return [part["text"] for parts in contents if isinstance(parts, list) for part in parts] + [
        text for text in contents if isinstance(text, str)
    ]


@pytest.fixture
def anywhere(monkeypatch):
    """Programs that are not installed are found."""
    found = Located(argv=["/polar/program"], path="/polar/bin:/bin", mounts=[])
    module = Located(argv=["python", "-I", "-c", "start", "/polar/packages", "module"], path="/bin", mounts=[])
    for preset in (qwen_code, opencode):
        monkeypatch.setattr(preset, "located", lambda name, package: found)
    for preset in (mini_swe_agent, aider):
        monkeypatch.setattr(preset, "located_module", lambda name, package: module)


def made(name, **options):
    return program(HarnessSpec(name=name, options=options), "do it", ROOT)


@pytest.mark.usefixtures("anywhere")
def test_qwen_code_keeps_to_its_tools_its_window_and_us():
    agent = made("qwen_code", tools=["run_shell_command"], context_window=9000, max_turns=3, system_prompt="-x")
    without = next(word for word in agent.argv if word.startswith("--exclude-tools="))
    assert {"agent", "skill", "tool_search", "web_fetch", "write_file"} <= set(without.split("=")[1].split(","))
    assert "run_shell_command" not in without
    assert "--system-prompt=-x" in agent.argv and agent.argv[-2:] == ["--max-session-turns", "3"]
    assert agent.environment["OPENAI_BASE_URL"] == f"{ROOT}/v1"
    settings = json.loads(agent.home[".qwen/settings.json"])
    assert agent.environment["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == "/home/agent/.qwen/settings.json"
    assert settings["model"]["generationConfig"]["contextWindowSize"] == 9000
    off = (settings["privacy"]["usageStatisticsEnabled"], settings["telemetry"]["enabled"])
    assert (*off, settings["general"]["enableAutoUpdate"]) == (False, False, False)
    unbounded = json.loads(made("qwen_code").home[".qwen/settings.json"])
    assert unbounded["model"]["generationConfig"]["contextWindowSize"] == qwen_code.UNBOUNDED


@pytest.mark.usefixtures("anywhere")
def test_opencode_keeps_to_its_tools_its_window_and_us():
    agent = made("opencode", tools=["bash"], context_window=9000, max_tokens=5, max_turns=3, system_prompt="X")
    configuration = json.loads(agent.home[".config/opencode/opencode.json"])
    assert configuration["provider"]["local"]["options"]["baseURL"] == f"{ROOT}/v1"
    assert configuration["provider"]["local"]["models"]["policy"]["limit"] == {"context": 9000, "output": 5}
    allowed = [name for name, rule in configuration["permission"].items() if rule == "allow"]
    assert allowed == ["external_directory", "doom_loop", "bash"]
    assert next(iter(configuration["permission"].items())) == ("*", "deny"), "the last rule that fits counts"
    assert configuration["agent"]["build"] == {"prompt": "X", "steps": 3}
    assert configuration["compaction"]["auto"] is True
    assert json.loads(made("opencode").home[".config/opencode/opencode.json"])["compaction"]["auto"] is False
    assert (configuration["autoupdate"], configuration["share"], configuration["lsp"]) == (False, "disabled", False)
    for switch in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "PROJECT_CONFIG"):
        assert agent.environment[f"OPENCODE_DISABLE_{switch}"] == "1"
    assert "--title" in agent.argv
    assert agent.home[".config/opencode/package.json"] == json.dumps(opencode.PLUGIN)


@pytest.mark.usefixtures("anywhere")
def test_mini_names_its_own_configuration_first_and_ours_after_it():
    agent = made("mini_swe_agent", max_turns=7, command_s=60)
    configurations = [agent.argv[index + 1] for index, word in enumerate(agent.argv) if word == "-c"][1:]
    assert configurations == [
        "/polar/packages/minisweagent/config/mini.yaml",
        "/home/agent/.mini-swe-agent/task.yaml",
    ]
    ours = json.loads(agent.home[".mini-swe-agent/task.yaml"])
    assert ours["model"]["model_kwargs"] == {"api_base": f"{ROOT}/v1", "api_key": "polar", "max_tokens": 4096}
    assert (ours["agent"]["step_limit"], ours["environment"], ours["run"]) == (7, {"timeout": 60}, {"task": "do it"})
    assert agent.environment["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


@pytest.mark.usefixtures("anywhere")
def test_aider_gets_its_files_its_format_and_the_switches():
    agent = made("aider", files=["a.py", "--help"], edit_format="diff", git=True)
    assert agent.argv[-3:] == ["--git", "--file=a.py", "--file=--help"]
    assert "--no-git" in made("aider").argv
    assert set(aider.SWITCHES) <= set(agent.argv)
    settings = json.loads(agent.home[".aider/settings.yml"])[0]
    assert (settings["edit_format"], settings["extra_params"]["api_base"]) == ("diff", f"{ROOT}/v1")
    assert agent.environment["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen_code", {"tools": ["agent"]}, "'agent' is unknown"),
        ("qwen_code", {"max_turns": 0}, "max_turns"),
        ("qwen_code", {"system_prompt": "\0"}, "NUL"),
        ("opencode", {"tools": ["write"]}, "'write' is unknown"),
        ("opencode", {"context_window": 10}, "context_window"),
        ("mini_swe_agent", {"tools": ["bash"]}, "tools"),
        ("mini_swe_agent", {"command_s": 0}, "command_s"),
        ("aider", {"edit_format": "patch"}, "edit_format"),
        ("aider", {"files": ["../x"]}, r"'\.\./x' must be a relative path"),
        ("custom", {}, "import_path"),
        ("custom", {"import_path": "os.path"}, "package.module:function"),
        ("custom", {"import_path": ".mine:agent"}, "package.module:function"),
        ("custom", {"import_path": "no_such_module:agent"}, "no_such_module cannot be imported: .*where the node runs"),
        ("custom", {"import_path": "json:no_such"}, "json holds no function no_such"),
        ("custom", {"import_path": "os:sep"}, "os holds no function sep"),
        ("custom", {"import_path": "harness_of_mine:returns_text"}, "returned str, not .*Program"),
        ("custom", {"import_path": "harness_of_mine:raises"}, "failed: ValueError: a b"),
        ("custom", {"import_path": "harness_of_mine:refuses"}, "^no such thing$"),
        ("custom", {"import_path": "json:dumps"}, "failed: TypeError"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(name, options, message, tmp_path, monkeypatch):
    mine(tmp_path, monkeypatch)
    with pytest.raises(HarnessError, match=message) as error:
        program(HarnessSpec(name=name, options=options), "do it", ROOT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*NAMES, "custom"])
@pytest.mark.parametrize("instruction", [" \n", "a\0b"])
def test_no_program_is_given_nothing_or_nul(name, instruction):
    options = {"import_path": "json:dumps"} if name == "custom" else {}
    with pytest.raises(HarnessError, match="instruction"):
        program(HarnessSpec(name=name, options=options), instruction, ROOT)


def mine(tmp_path, monkeypatch):
    """A module of harnesses, in the Python path."""
    (tmp_path / "harness_of_mine.py").write_text(
        "from polar.harnesses import HarnessError, addresses\n"
        "from polar.runtimes.runtime import Program\n"
        "def agent(options, instruction, root):\n"
        "    return Program(argv=['mine', *options['words']], stdin=instruction, environment=addresses(root))\n"
        "def returns_text(options, instruction, root):\n    return 'mine'\n"
        "def raises(options, instruction, root):\n    raise ValueError('a\\nb')\n"
        "def refuses(options, instruction, root):\n    raise HarnessError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_custom_harness_gets_its_own_options_the_instruction_and_the_root(tmp_path, monkeypatch):
    mine(tmp_path, monkeypatch)
    agent = made("custom", import_path="harness_of_mine:agent", words=["-x"])
    assert isinstance(agent, Program)
    assert (agent.argv, agent.stdin) == (["mine", "-x"], "do it")
    assert agent.environment["ANTHROPIC_BASE_URL"] == ROOT


def test_a_custom_harness_is_not_imported_where_a_task_is_only_checked():
    assert custom.checked({"import_path": "no_such_module:agent"}, "do it") == "no_such_module:agent"


def test_a_venv_whose_interpreter_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path))
    packages = tmp_path / "aider" / "lib" / "python3.11" / "site-packages"
    (packages / f"aider_chat-{aider.PACKAGE.version}.dist-info").mkdir(parents=True)
    scripts = tmp_path / "aider" / "bin"
    scripts.mkdir()
    (scripts / "aider").touch()
    (scripts / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(HarnessError, match=r"bin/python is missing: run 'polar harness install aider'"):
        located_module("aider", aider.PACKAGE)


def test_a_venv_s_interpreter_is_seen_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path / "harnesses"))
    place, base = tmp_path / "harnesses" / "aider", tmp_path / "python"
    (place / "lib" / "python3.11" / "site-packages" / f"aider_chat-{aider.PACKAGE.version}.dist-info").mkdir(
        parents=True
    )
    for folder in (place / "bin", base / "bin", base / "lib"):
        folder.mkdir(parents=True)
    (place / "bin" / "aider").touch()
    (base / "bin" / "python3.11").touch()
    (place / "bin" / "python").symlink_to(base / "bin" / "python3.11")
    found = located_module("aider", aider.PACKAGE)
    assert found.argv[0] == "/polar/python/bin/python3.11"
    assert found.argv[-2:] == ["/polar/aider/lib/python3.11/site-packages", "aider"]
    assert {mount.target: mount.source for mount in found.mounts} == {"/polar/aider": place, "/polar/python": base}
    (base / "lib" / "libpython3.11.so.1.0").touch()
    assert located_module("aider", aider.PACKAGE).argv[:2] == ["env", "LD_LIBRARY_PATH=/polar/python/lib"]
