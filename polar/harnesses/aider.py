"""Aider (pip), for one message: it edits files by the text of the answer, without tools, over Chat Completions.

Installed with pip into a venv of its own. The session's token is in the model settings' ``api_base``, which beats
whatever a .env or .aider.conf.yml in the work folder says; no header names a session. The update check, analytics,
release notes, links in the instruction and the list of models (its entry for ours is given) are switched off: it talks
to nobody else. The instruction is a file in its home: nothing in it is read as a flag.
It sees the files that ``files`` names, and may create others. With ``git`` it works in the work folder's repository,
whose files it then finds by name, and makes one where there is none; it commits nothing. A call more is made only when
an edit does not apply, or the answer names files that it has not seen.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import HarnessError, PipPackage
from polar.harnesses.venvs import located_module
from polar.runtimes.bubblewrap import HOME
from polar.runtimes.names import INSIDE, wrong_path
from polar.runtimes.runtime import Program

PACKAGE = PipPackage(package="aider-chat", version="0.86.2", module="aider", requirements="harness-aider.txt")
FOLDER = ".aider"
UNBOUNDED = 10_000_000
"""Tokens: it would ask whether to go on beyond its context window, and is told to say yes."""
NAME = f"openai/{MODEL}"
SWITCHES = (
    *("--yes-always", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-detect-urls"),
    *("--no-show-model-warnings", "--no-auto-commits", "--no-dirty-commits", "--no-gitignore", "--no-auto-lint"),
    *("--no-suggest-shell-commands", "--disable-playwright", "--no-pretty", "--no-fancy-input", "--map-tokens", "0"),
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``edit_format`` whole asks for whole files, diff and udiff for changes."""

    files: tuple[str, ...] = ()
    edit_format: Literal["whole", "diff", "udiff"] = "whole"
    git: bool = False
    max_tokens: Annotated[int, Meta(ge=1)] = 4096


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "aider")
    if wrong := [name for name in read.files if wrong_path(name)]:
        raise HarnessError(f"harness aider: options.files: {wrong[0]!r} must be {INSIDE}")
    check_instruction(instruction, "aider")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    aider, home = located_module("aider", PACKAGE), f"{HOME}/{FOLDER}"
    return Program(
        argv=[
            *(*aider.argv, "--model", NAME, "--weak-model", NAME, "--edit-format", read.edit_format),
            *("--model-settings-file", f"{home}/settings.yml", "--model-metadata-file", f"{home}/metadata.json"),
            *("--message-file", f"{home}/instruction.txt", "--env-file", f"{home}/env"),
            *("--input-history-file", f"{home}/input.history", "--chat-history-file", f"{home}/chat.history.md"),
            *(*SWITCHES, "--git" if read.git else "--no-git", *(f"--file={name}" for name in read.files)),
        ],
        environment={"PATH": aider.path, "OPENAI_API_KEY": API_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        home={
            f"{FOLDER}/settings.yml": json.dumps([_settings(read, root)]),
            f"{FOLDER}/metadata.json": json.dumps({NAME: _metadata(read)}),
            # At the beginning, / and ! would be commands.
            f"{FOLDER}/instruction.txt": f"\n{instruction}" if instruction[0] in "/!" else instruction,
        },
        mounts=aider.mounts,
    )


def _settings(options: Options, root: str) -> dict[str, Any]:
    return {
        "name": NAME,
        "edit_format": options.edit_format,
        "weak_model_name": NAME,
        "use_repo_map": False,
        "use_temperature": False,
        "extra_params": {"api_base": f"{root}/v1", "api_key": API_KEY, "max_tokens": options.max_tokens},
    }


def _metadata(options: Options) -> dict[str, Any]:
    return {
        "max_tokens": options.max_tokens,
        "max_input_tokens": UNBOUNDED,
        "max_output_tokens": options.max_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }


PRESET = Preset(
    program=program,
    checked=checked,
    package=PACKAGE,
    dialects=("openai.chat",),
    notes="edits by text, without tools; mostly a single call",
)
