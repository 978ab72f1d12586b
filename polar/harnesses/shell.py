"""Any command line as an agent: bash runs ``options.command``, with the instruction in POLAR_INSTRUCTION."""

from __future__ import annotations

from typing import Any

import msgspec

from polar.harnesses.harness import API_KEY, HarnessError, read_options
from polar.runtimes.runtime import Program


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str


def checked(options: dict[str, Any], instruction: str) -> Options:
    """Raises HarnessError for what bash cannot be given."""
    read = read_options(options, Options, "shell")
    if not read.command.strip() or "\0" in read.command + instruction:
        raise HarnessError("harness shell: options.command must be a command line, without NUL characters")
    return read


def program(options: dict[str, Any], instruction: str, base_url: str) -> Program:
    """pipefail, so that ``agent | tee log`` fails when the agent does."""
    command = checked(options, instruction).command
    return Program(
        argv=["bash", "-o", "pipefail", "-c", command],
        environment={
            "POLAR_INSTRUCTION": instruction,
            "POLAR_BASE_URL": base_url,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": API_KEY,
        },
    )
