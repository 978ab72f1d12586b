"""Pi (@earendil-works/pi-coding-agent), headless, pointed at the gateway by a models.json in its own folder.

Its prompt is kept small by its own switches. It always ends the system prompt with the date and the working
directory. The instruction goes in by stdin, where nothing is read as a flag or as @file. Compaction is switched off:
it would make calls that are no turns of the agent.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, HarnessError, read_options
from polar.runtimes.bubblewrap import HOME, PATH
from polar.runtimes.runtime import Mount, Program

PACKAGE, VERSION = "@earendil-works/pi-coding-agent", "0.74.2"
DEFAULT_PREFIX = ".cache/npm"
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
    if not instruction.strip():
        raise HarnessError("harness pi: the instruction is empty")
    return read


def program(options: dict[str, Any], instruction: str, base_url: str) -> Program:
    read = checked(options, instruction)
    prefix, node = installed()
    mounts, node_path = [Mount(prefix, "/polar/npm")], str(node)
    if node.is_relative_to(prefix):
        node_path = f"/polar/npm/{node.relative_to(prefix)}"
    elif not node.is_relative_to("/usr"):
        mounts.append(Mount(node.parent.parent, "/polar/node"))
        node_path = "/polar/node/bin/node"
    tools = ["--tools", ",".join(read.tools)] if read.tools else ["--no-tools"]
    switches = ["--no-session", "--no-skills", "--no-context-files", "--no-extensions", "--no-prompt-templates"]
    return Program(
        argv=[
            *(node_path, f"/polar/npm/node_modules/{PACKAGE}/dist/cli.js", "-p", *switches, "--no-themes"),
            *("--provider", "local", "--model", "policy", *tools, "--system-prompt", read.system_prompt),
        ],
        environment={
            "PATH": f"{Path(node_path).parent}:{PATH}",
            "PI_CODING_AGENT_DIR": f"{HOME}/{FOLDER}",
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
        },
        stdin=instruction,
        home={
            f"{FOLDER}/models.json": json.dumps({"providers": {"local": _provider(read, base_url)}}),
            f"{FOLDER}/settings.json": json.dumps({"compaction": {"enabled": False}}),
        },
        mounts=mounts,
    )


def _provider(options: Options, base_url: str) -> dict[str, Any]:
    model = {
        "id": "policy",
        "name": "policy",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": options.context_window,
        "maxTokens": options.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    return {"baseUrl": base_url, "api": "openai-completions", "apiKey": API_KEY, "models": [model]}


def installed() -> tuple[Path, Path]:
    """The npm prefix (POLAR_NPM_PREFIX, else .cache/npm), and its own node, else the one in PATH.

    Raises HarnessError without the pinned Pi, or without node.
    """
    return _installed(os.environ.get("POLAR_NPM_PREFIX") or DEFAULT_PREFIX)


@functools.cache
def _installed(prefix: str) -> tuple[Path, Path]:
    root = Path(prefix).resolve()
    manifest = root / "node_modules" / PACKAGE / "package.json"
    if not manifest.is_file():
        raise HarnessError(f"harness pi: {manifest} is missing: run make setup, or set POLAR_NPM_PREFIX")
    if (version := json.loads(manifest.read_text())["version"]) != VERSION:
        raise HarnessError(f"harness pi: {root} holds version {version}, not {VERSION}: run make setup")
    own = root / "node_modules" / "node" / "bin" / "node"
    if own.is_file():
        return root, own.resolve()
    if (node := shutil.which("node")) is None:
        raise HarnessError("harness pi: node is not in PATH: install Node 20 or newer")
    return root, Path(node).resolve()
