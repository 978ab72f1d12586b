"""mini-SWE-agent (pip), speaking Chat Completions through LiteLLM, never streamed.

Installed with pip into a venv of its own. The session's token is in the model's ``api_base``, and no header names a
session. LiteLLM's list of prices is the one it brings along, and there is no other network use.
Its configuration is its own mini.yaml, by its full path since a mini.yaml in the work folder would come first, and
then ours, which also holds the instruction: nothing in it is read as a flag. It ends with the command
``echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`` alone; after three answers in a row without a tool call, or at
``max_turns``, it gives up with exit code 0. It never compacts: a full context ends it.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polar.harnesses.harness import API_KEY, MODEL, Preset, check_instruction, read_options
from polar.harnesses.packages import PipPackage
from polar.harnesses.venvs import located_module
from polar.runtimes.bubblewrap import HOME
from polar.runtimes.runtime import Program

PACKAGE = PipPackage(
    package="mini-swe-agent", version="2.4.6", module="minisweagent.run.mini", requirements="harness-mini_swe_agent.txt"
)
FOLDER = ".mini-swe-agent"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_turns`` 0 is no limit; ``command_s`` bounds each command. An empty ``system_prompt`` leaves its own."""

    system_prompt: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] = 4096
    max_turns: Annotated[int, Meta(ge=0)] = 0
    command_s: Annotated[int, Meta(ge=1)] = 30


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what cannot work on any machine."""
    read = read_options(options, Options, "mini_swe_agent")
    check_instruction(instruction, "mini_swe_agent")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    read = checked(options, instruction)
    mini = located_module("mini_swe_agent", PACKAGE)
    packages = mini.argv[-2]
    return Program(
        argv=[
            *(*mini.argv, "-c", f"{packages}/minisweagent/config/mini.yaml", "-c", f"{HOME}/{FOLDER}/task.yaml"),
            *("-o", f"{HOME}/{FOLDER}/trajectory.json"),
        ],
        environment={
            "PATH": mini.path,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{HOME}/{FOLDER}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        home={f"{FOLDER}/task.yaml": _yaml(_configuration(read, instruction, root))},
        mounts=mini.mounts,
    )


def _configuration(options: Options, instruction: str, root: str) -> dict[str, Any]:
    agent: dict[str, Any] = {"mode": "yolo", "confirm_exit": False, "cost_limit": 0, "step_limit": options.max_turns}
    if options.system_prompt:
        # As a string of the template language, in which nothing of it is a template.
        agent["system_template"] = f"{{{{ {json.dumps(options.system_prompt, ensure_ascii=False)} }}}}"
    return {
        "run": {"task": instruction},
        "agent": agent,
        "environment": {"timeout": options.command_s},
        "model": {
            "model_name": f"openai/{MODEL}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": {"api_base": f"{root}/v1", "api_key": API_KEY, "max_tokens": options.max_tokens},
        },
    }


def _yaml(value: dict[str, Any]) -> str:
    """As JSON, which YAML takes, but with its escapes: it has no surrogate pairs, and is wary of rare characters."""
    return re.sub(r"[^ -~]", lambda rare: f"\\U{ord(rare[0]):08x}", json.dumps(value, ensure_ascii=False))


PRESET = Preset(
    program=program,
    checked=checked,
    package=PACKAGE,
    dialects=("openai.chat",),
    notes="bash only; never streams",
)
