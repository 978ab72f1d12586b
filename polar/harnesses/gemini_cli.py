"""Gemini CLI (@google/gemini-cli), headless, pointed at the gateway by GOOGLE_GEMINI_BASE_URL (generateContent).

The instruction goes in by stdin, where nothing is read as a flag. Usage statistics, telemetry and updates are switched
off by its settings file. The session's token is in the base URL. GEMINI_CLI_NO_RELAUNCH saves it from starting itself a
second time, for a larger heap than a sandbox has. Of its own it would sample with topK 64 and topP 0.95, which leaves
out tokens that the policy may take: a model alias in its settings says otherwise. It compacts nothing: what it may
leave out of a conversation ends at its last instruction, and there is only one. @path of a file in the work folder
adds that file to the instruction, as it always does, and a .gemini/settings.json there comes before ours.
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
    package="@google/gemini-cli",
    version="0.61.0",
    binary="node_modules/@google/gemini-cli/bundle/gemini.js",
    node=True,
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tools`` are Gemini CLI's own names; none offers all of them. It never compacts: a full context ends it."""

    tools: tuple[str, ...] | None = ("run_shell_command", "read_file", "write_file", "replace")
    max_tokens: Annotated[int, Meta(ge=1)] = 8192


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "gemini_cli")
    if wrong := [tool for tool in read.tools or () if not tool.isidentifier()]:
        raise HarnessError(f"harness gemini_cli: tool {wrong[0]!r} is no tool's name: use names like write_file")
    check_instruction(instruction, "gemini_cli")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    gemini = located("gemini_cli", PACKAGE)
    return Program(
        argv=[*gemini.argv, "--yolo", "--model", MODEL, "--output-format", "text"],
        environment={
            "PATH": gemini.path,
            "GEMINI_CLI_HOME": HOME,
            "GOOGLE_GEMINI_BASE_URL": root,
            "GEMINI_API_KEY": API_KEY,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_CLI_NO_RELAUNCH": "true",
        },
        stdin=instruction,
        home={".gemini/settings.json": json.dumps(_settings(read))},
        mounts=gemini.mounts,
    )


def _settings(options: Options) -> dict[str, Any]:
    sampling = {"temperature": 1, "topP": 1, "maxOutputTokens": options.max_tokens}
    settings: dict[str, Any] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {"compressionThreshold": 1},
        "modelConfigs": {
            "customAliases": {MODEL: {"modelConfig": {"model": MODEL, "generateContentConfig": sampling}}}
        },
    }
    if options.tools is not None:
        settings["tools"] = {"core": list(options.tools)}
    return settings


PRESET = Preset(program=program, checked=checked, package=PACKAGE, dialects=("google.generate",))
