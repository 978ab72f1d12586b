"""Agent programs: one module each, and ``HARNESSES`` by name.

May import `schemas` and `polar.runtimes` only.
"""

from __future__ import annotations

from polar.harnesses import claude_code, codex, gemini_cli, pi, shell
from polar.harnesses.harness import Preset, addresses
from polar.harnesses.packages import HarnessError
from polar.runtimes.runtime import Program
from schemas.tasks import HarnessSpec

HARNESSES: dict[str, Preset] = {
    "claude_code": claude_code.PRESET,
    "codex": codex.PRESET,
    "gemini_cli": gemini_cli.PRESET,
    "pi": pi.PRESET,
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
