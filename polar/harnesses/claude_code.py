"""Claude Code (@anthropic-ai/claude-code), headless, pointed at the gateway by ANTHROPIC_BASE_URL (Messages API).

The native program needs no Node. The instruction goes in by stdin, where nothing is read as a flag; @path is left as it
is, and a space before a leading slash keeps it from being one of its commands. Telemetry, error reports, updates and
other traffic that is not a model call are switched off. The session's token is in the base URL. The attribution header
goes away as well: it is a first system block that differs in each conversation. IS_SANDBOX says that skipping
permissions is safe here, which it asks for when it runs as root.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import HarnessError, NpmPackage, located
from polar.runtimes.bubblewrap import HOME
from polar.runtimes.runtime import Program

PACKAGE = NpmPackage(
    package="@anthropic-ai/claude-code", version="2.1.332", binary="node_modules/.bin/claude", node=False
)
FOLDER = ".claude"
SWITCHES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "900000",
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_FILE_MENTIONS": "1",
    "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
}
KEPT_FREE = 20_000
"""Tokens of a context window: the 13,000 that it keeps free for a summary, and its first request."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tools`` are Claude Code's own names; none offers all of them. ``max_tokens`` bounds each response.

    ``context_window`` is what it believes the model has: it compacts when about 13,000 tokens and ``max_tokens`` are
    left of it, and never without it. ``system_prompt`` replaces its own.
    """

    tools: tuple[str, ...] | None = ("Bash", "Edit", "Read", "Write")
    system_prompt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 8192
    thinking: bool = False
    context_window: Annotated[int, Meta(ge=1024)] | None = None


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "claude_code")
    if wrong := [tool for tool in read.tools or () if not tool.isidentifier()]:
        raise HarnessError(f"harness claude_code: tool {wrong[0]!r} is no tool's name: use names like Bash")
    if read.context_window is not None and read.context_window < (least := read.max_tokens + KEPT_FREE):
        raise HarnessError(f"harness claude_code: options.context_window must be {least} or more with these max_tokens")
    if "\0" in (read.system_prompt or ""):
        raise HarnessError("harness claude_code: options.system_prompt must be without NUL characters")
    check_instruction(instruction, "claude_code")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    claude = located("claude_code", PACKAGE)
    return Program(
        argv=[*claude.argv, *_switches(read)],
        environment={
            "PATH": claude.path,
            "CLAUDE_CONFIG_DIR": f"{HOME}/{FOLDER}",
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": API_KEY,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(read.max_tokens),
            **SWITCHES,
            **_chosen(read),
        },
        stdin=f" {instruction}" if instruction.startswith("/") else instruction,
        mounts=claude.mounts,
    )


def _switches(options: Options) -> list[str]:
    line = ["-p", "--dangerously-skip-permissions", "--strict-mcp-config", "--disable-slash-commands"]
    line += ["--no-session-persistence", "--setting-sources", "user", "--model", MODEL]
    if options.tools is not None:
        line += ["--tools", ",".join(options.tools)]
    if options.system_prompt is not None:
        line += [f"--system-prompt={options.system_prompt}"]
    return line


def _chosen(options: Options) -> dict[str, str]:
    thinking = {} if options.thinking else {"MAX_THINKING_TOKENS": "0"}
    if options.context_window is None:
        return {**thinking, "DISABLE_COMPACT": "1"}
    return {**thinking, "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(options.context_window)}


PRESET = Preset(program=program, checked=checked, package=PACKAGE, dialects=("anthropic.messages",))
