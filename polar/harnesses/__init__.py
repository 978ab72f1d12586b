"""Agent programs: one module each, and ``HARNESSES`` by name.

May import `schemas` and `polar.runtimes` only.
"""

from __future__ import annotations

from polar.harnesses import (
    aider,
    claude_code,
    codex,
    custom,
    gemini_cli,
    mini_swe_agent,
    opencode,
    pi,
    qwen_code,
    shell,
)
from polar.harnesses.harness import Preset, addresses
from polar.harnesses.packages import HarnessError
from polar.runtimes.runtime import Program
from schemas.tasks import HarnessSpec

HARNESSES: dict[str, Preset] = {
    "aider": aider.PRESET,
    "claude_code": claude_code.PRESET,
    "codex": codex.PRESET,
    "custom": custom.PRESET,
    "gemini_cli": gemini_cli.PRESET,
    "mini_swe_agent": mini_swe_agent.PRESET,
    "opencode": opencode.PRESET,
    "pi": pi.PRESET,
    "qwen_code": qwen_code.PRESET,
    "shell": shell.PRESET,
}


def program(spec: HarnessSpec, instruction: str, root: str) -> Program:
    """The program that works on ``instruction`` with the model below ``root``, http://HOST:PORT/s/TOKEN.

    Raises HarnessError.
    """
    if spec.name not in HARNESSES:
        raise HarnessError(f"harness {spec.name!r} is unknown: use one of {', '.join(sorted(HARNESSES))}")
    return HARNESSES[spec.name].program(spec.options, instruction, root)


__all__ = ["HARNESSES", "HarnessError", "Preset", "addresses", "program"]
