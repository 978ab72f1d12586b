"""Any command line as an agent: bash runs ``options.command``, with the instruction in POLAR_INSTRUCTION.

It finds the model by the variables that common client libraries read (``harness.addresses``); the session's token is
in each of those URLs. Nothing keeps it from other network use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polar.harnesses.harness import Preset, addresses, read_options
from polar.harnesses.packages import HarnessError
from polar.runtimes.runtime import Program


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what bash cannot be given."""
    read = read_options(options, Options, "shell")
    if not read.command.strip() or "\0" in read.command + instruction:
        raise HarnessError("harness shell: options.command must be a command line, without NUL characters")
    return read


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    """pipefail, so that ``agent | tee log`` fails when the agent does."""
    command = checked(options, instruction).command
    return Program(
        argv=["bash", "-o", "pipefail", "-c", command],
        environment={"POLAR_INSTRUCTION": instruction, **addresses(root)},
    )


PRESET = Preset(
    program=program,
    checked=checked,
    dialects=("openai.chat", "openai.responses", "anthropic.messages", "google.generate"),
    notes="any command line",
)
