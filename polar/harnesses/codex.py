"""Codex (@openai/codex), headless, pointed at the gateway by a provider of its own in config.toml (Responses API).

The native program is started without its Node wrapper. The instruction goes in by stdin (``-``), where nothing is read
as a flag. What would reach other hosts is switched off: plugins, apps, analytics, the update check, and web search. The
session's token is in the provider's base URL. It runs commands without its own sandbox: ours is around it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import NpmPackage, located
from polar.runtimes.bubblewrap import HOME
from polar.runtimes.runtime import Program

PACKAGE = NpmPackage(
    package="@openai/codex",
    version="0.171.0",
    binary="node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
    node=False,
)
FOLDER = ".codex"
NO_NETWORK = ("plugins", "apps")
"""Features that ask hosts of their own."""
LEAN = ("goals", "shell_snapshot")
"""Features that add tools or files, and that a task rarely needs."""
ITS_WINDOW = 272_000
"""Tokens: what it takes an unknown model's context window for, and the most that it can be told."""
IDLE_MS = 900_000


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``context_window`` is what it believes the model has; it compacts at nine tenths of that.

    ``lean`` leaves it four tools, without sub-agents, goals and built-in skills.
    """

    context_window: Annotated[int, Meta(ge=1024, le=ITS_WINDOW)] = ITS_WINDOW
    lean: bool = True


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    check_instruction(instruction, "codex")
    return read_options(options, Options, "codex")


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    codex = located("codex", PACKAGE)
    return Program(
        argv=[
            *(*codex.argv, "exec", "--ephemeral", "--dangerously-bypass-approvals-and-sandbox"),
            *("--skip-git-repo-check", "--color", "never", "-"),
        ],
        environment={"PATH": codex.path, "CODEX_HOME": f"{HOME}/{FOLDER}", "POLAR_KEY": API_KEY},
        stdin=instruction,
        home={f"{FOLDER}/config.toml": _config(read, root)},
        mounts=codex.mounts,
    )


def _config(options: Options, root: str) -> str:
    off = NO_NETWORK + (LEAN if options.lean else ())
    return "\n".join(
        [
            f'model = "{MODEL}"',
            'model_provider = "polar"',
            f"model_context_window = {options.context_window}",
            f"model_auto_compact_token_limit = {options.context_window * 9 // 10}",
            "check_for_update_on_startup = false",
            'web_search = "disabled"',
            "[analytics]",
            "enabled = false",
            "[features]",
            *(f"{feature} = false" for feature in off),
            "[agents]",
            f"enabled = {str(not options.lean).lower()}",
            "[skills.bundled]",
            f"enabled = {str(not options.lean).lower()}",
            "[model_providers.polar]",
            'name = "polar"',
            f"base_url = {json.dumps(f'{root}/v1')}",
            'env_key = "POLAR_KEY"',
            'wire_api = "responses"',
            f"stream_idle_timeout_ms = {IDLE_MS}",
            "",
        ]
    )


PRESET = Preset(program=program, checked=checked, package=PACKAGE, dialects=("openai.responses",))
