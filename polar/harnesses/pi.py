"""Pi (@earendil-works/pi-coding-agent), headless, pointed at the gateway by a models.json in its own folder.

Its prompt is kept small by its own switches. It always ends the system prompt with the date and the working
directory. The instruction goes in by stdin, where nothing is read as a flag or as @file. Compaction is switched off:
it would make calls that are no turns of the agent. PI_OFFLINE and PI_TELEMETRY keep it from other network use. The
session's token is in the provider's base URL.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import HarnessError, NpmPackage, located
from polar.runtimes.bubblewrap import HOME
from polar.runtimes.runtime import Program

PACKAGE = NpmPackage(
    package="@earendil-works/pi-coding-agent",
    version="0.74.2",
    binary="node_modules/@earendil-works/pi-coding-agent/dist/cli.js",
    node=True,
)
FOLDER = ".pi-agent"
TOOLS = frozenset({"read", "bash", "edit", "write", "grep", "find", "ls"})


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_tokens`` bounds each response; ``context_window`` is what Pi believes the model has."""

    system_prompt: str = "You are an agent. Use the bash tool to do what the user asks."
    tools: tuple[str, ...] = ("bash",)
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    context_window: Annotated[int, Meta(ge=1024)] = 32768


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "pi")
    if unknown := sorted(set(read.tools) - TOOLS):
        raise HarnessError(f"harness pi: tool {unknown[0]!r} is unknown: use some of {', '.join(sorted(TOOLS))}")
    if "\0" in read.system_prompt:
        raise HarnessError("harness pi: options.system_prompt must be without NUL characters")
    check_instruction(instruction, "pi")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    pi = located("pi", PACKAGE)
    tools = ["--tools", ",".join(read.tools)] if read.tools else ["--no-tools"]
    switches = ["--no-session", "--no-skills", "--no-context-files", "--no-extensions", "--no-prompt-templates"]
    return Program(
        argv=[
            *(*pi.argv, "-p", *switches, "--no-themes"),
            *("--provider", "local", "--model", MODEL, *tools, "--system-prompt", read.system_prompt),
        ],
        environment={
            "PATH": pi.path,
            "PI_CODING_AGENT_DIR": f"{HOME}/{FOLDER}",
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
        },
        stdin=instruction,
        home={
            f"{FOLDER}/models.json": json.dumps({"providers": {"local": _provider(read, root)}}),
            f"{FOLDER}/settings.json": json.dumps({"compaction": {"enabled": False}}),
        },
        mounts=pi.mounts,
    )


def _provider(options: Options, root: str) -> dict[str, Any]:
    model = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": options.context_window,
        "maxTokens": options.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    return {"baseUrl": f"{root}/v1", "api": "openai-completions", "apiKey": API_KEY, "models": [model]}


PRESET = Preset(program=program, checked=checked, package=PACKAGE, dialects=("openai.chat",), notes="small and quick")
