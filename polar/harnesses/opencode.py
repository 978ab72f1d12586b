"""OpenCode (opencode-ai), headless, speaking Chat Completions by its OpenAI-compatible provider.

Installed as an npm package that holds a native program. The session's token is in the provider's base URL; beside it
OpenCode names its own sessions in ``x-session-id`` and, for a sub-agent, ``x-parent-session-id``. Updates, sharing, the
list of models, language servers and formatters are switched off, and the plugin package that it would fetch from the
npm registry at its first start is declared as installed: it talks to nobody else. Configuration in the work folder is
not read. ``--title`` saves the call that would name the session.
The instruction goes in by stdin, where nothing is read as a flag, /command or @file.
Bun, which it runs on, reserves memory that it never uses; a sandbox counts that, and without the JIT that it then gives
up OpenCode takes three times the CPU, or crashes. ``RESERVATIONS`` keep it to about 1.2 GiB.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import HarnessError, NpmPackage, located
from polar.runtimes.runtime import Program

PACKAGE = NpmPackage(
    package="opencode-ai", version="1.18.33", binary="node_modules/opencode-ai/bin/opencode.exe", node=False
)
TOOLS = frozenset({"bash", "read", "edit", "glob", "grep", "todowrite", "task"})
FOLDER = ".config/opencode"
PLUGIN = {"dependencies": {"@opencode-ai/plugin": PACKAGE.version}}
UNBOUNDED = 10_000_000
"""Tokens: for no context window."""
RESERVATIONS = {
    "BUN_JSC_jitMemoryReservationSize": str(128 * 2**20),
    "BUN_JSC_structureHeapSizeInKB": str(128 * 2**10),
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    "MIMALLOC_ARENA_RESERVE": str(64 * 2**10),
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tool ``edit`` comes with ``write``; ``task`` starts sub-agents. After ``max_turns`` the model is asked to
    sum up; nothing stops one that goes on but the task's budget.

    ``context_window`` is what it believes the model has: it compacts before that is full, and never without it.
    An empty ``system_prompt`` leaves its own.
    """

    system_prompt: str = ""
    tools: tuple[str, ...] = ("bash", "read", "edit", "glob", "grep")
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    context_window: Annotated[int, Meta(ge=1024)] | None = None
    max_turns: Annotated[int, Meta(ge=1)] | None = None


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "opencode")
    if unknown := sorted(set(read.tools) - TOOLS):
        raise HarnessError(f"harness opencode: tool {unknown[0]!r} is unknown: use some of {', '.join(sorted(TOOLS))}")
    check_instruction(instruction, "opencode")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    opencode = located("opencode", PACKAGE)
    return Program(
        argv=[
            *(*opencode.argv, "run", "--pure", "--auto", "--format", "json"),
            *("--title", "session", "--model", f"local/{MODEL}"),
        ],
        environment={
            "PATH": opencode.path,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
            "OPENCODE_DISABLE_CLAUDE_CODE": "1",
            **RESERVATIONS,
        },
        stdin=instruction,
        home={
            f"{FOLDER}/opencode.json": json.dumps(_configuration(read, root)),
            f"{FOLDER}/package.json": json.dumps(PLUGIN),
            f"{FOLDER}/package-lock.json": json.dumps({"packages": {"": PLUGIN}}),
            f"{FOLDER}/node_modules/.keep": "",
        },
        mounts=opencode.mounts,
    )


def _configuration(options: Options, root: str) -> dict[str, Any]:
    build: dict[str, Any] = {}
    if options.system_prompt:
        build["prompt"] = options.system_prompt
    if options.max_turns:
        build["steps"] = options.max_turns
    limit = {"context": options.context_window or UNBOUNDED, "output": options.max_tokens}
    return {
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "lsp": False,
        "formatter": False,
        "compaction": {"auto": options.context_window is not None, "prune": False},
        "permission": {
            "*": "deny",
            **dict.fromkeys(("external_directory", "doom_loop", *options.tools), "allow"),
        },
        "agent": {"build": build},
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{root}/v1", "apiKey": API_KEY},
                "models": {MODEL: {"limit": limit}},
            }
        },
    }


PRESET = Preset(
    program=program,
    checked=checked,
    package=PACKAGE,
    dialects=("openai.chat",),
    notes="the largest process: 640 MB",
)
