"""Qwen Code (@qwen-code/qwen-code), headless, speaking Chat Completions.

Installed as an npm package, with the Node that it needs. Its settings are the system's settings to it, so that none in
the work folder undo them; the session's token is in OPENAI_BASE_URL, and no header names a session. Statistics,
telemetry and updates are switched off: it talks to nobody else.
Its prompt is kept small: no sub-agents, no skills, no memory, and only the tools that ``tools`` names. A response that
is cut at ``max_tokens`` is thrown away by it, and sampled again with twice as many.
The instruction goes in by stdin as the argument of a command of its own, where it reads neither /command nor @file.
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
    package="@qwen-code/qwen-code",
    version="0.24.4",
    binary="node_modules/@qwen-code/qwen-code/cli-entry.js",
    node=True,
)
TOOLS = frozenset({"read_file", "write_file", "edit", "run_shell_command", "glob", "grep_search"})
OTHER_TOOLS = (
    *("agent", "skill", "tool_search", "tool_call", "list_agents", "get_goal", "update_goal", "notebook_edit"),
    *("cron_create", "cron_delete", "cron_list", "enter_worktree", "exit_worktree", "loop_wakeup", "monitor"),
    *("read_mcp_resource", "record_artifact", "report_findings", "send_message", "task_stop", "web_fetch"),
    *("zoom_image", "todo_write", "workflow"),
)
SETTINGS = ".qwen/settings.json"
UNBOUNDED = 10_000_000
"""Tokens: a context window that no history fills, so that nothing is compacted."""
COMMAND = ".qwen/commands/task.toml"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``context_window`` is what it believes the model has: it compacts before that is full, and never without it.

    With it, it also asks for less than ``max_tokens`` as the window fills, down to 4000. ``max_turns`` ends it with
    exit code 53. An empty ``system_prompt`` leaves its own.
    """

    system_prompt: str = ""
    tools: tuple[str, ...] = ("read_file", "write_file", "edit", "run_shell_command", "glob", "grep_search")
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    context_window: Annotated[int, Meta(ge=1024)] | None = None
    max_turns: Annotated[int, Meta(ge=1)] | None = None


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "qwen_code")
    if unknown := sorted(set(read.tools) - TOOLS):
        raise HarnessError(f"harness qwen_code: tool {unknown[0]!r} is unknown: use some of {', '.join(sorted(TOOLS))}")
    if "\0" in read.system_prompt:
        raise HarnessError("harness qwen_code: options.system_prompt must be without NUL characters")
    check_instruction(instruction, "qwen_code")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    qwen = located("qwen_code", PACKAGE)
    without = ",".join([*OTHER_TOOLS, *sorted(TOOLS - set(read.tools))])
    argv = [*qwen.argv, "--yolo", "--auth-type", "openai", "--chat-recording=false", f"--exclude-tools={without}"]
    argv += [f"--system-prompt={read.system_prompt}"] if read.system_prompt else []
    argv += ["--max-session-turns", str(read.max_turns)] if read.max_turns else []
    return Program(
        argv=argv,
        environment={
            "PATH": qwen.path,
            "OPENAI_BASE_URL": f"{root}/v1",
            "OPENAI_API_KEY": API_KEY,
            "OPENAI_MODEL": MODEL,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{HOME}/{SETTINGS}",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        },
        # It puts the argument into its prompt by a replacement in which $ is special.
        stdin="/task " + instruction.replace("$", "$$"),
        home={SETTINGS: json.dumps(_settings(read)), COMMAND: 'prompt = "{{args}}"\n'},
        mounts=qwen.mounts,
    )


def _settings(options: Options) -> dict[str, Any]:
    sampling = {"max_tokens": options.max_tokens}
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
        "tools": {"useRipgrep": False},
        "skills": {"disabledLevels": ["project", "user", "extension", "bundled"]},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        "model": {
            "name": MODEL,
            "generationConfig": {"contextWindowSize": options.context_window or UNBOUNDED, "samplingParams": sampling},
        },
    }


PRESET = Preset(
    program=program,
    checked=checked,
    package=PACKAGE,
    dialects=("openai.chat",),
    notes="no session id of its own; 40 kB first request",
)
