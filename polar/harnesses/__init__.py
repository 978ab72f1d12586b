"""Agent programs: one module each, and ``HARNESSES`` by name.

May import `schemas` and `polar.runtimes` only.
"""

from __future__ import annotations

from polar.harnesses import pi, shell
from polar.harnesses.harness import Check, Harness, HarnessError
from polar.runtimes.runtime import Program
from schemas.tasks import HarnessSpec

HARNESSES: dict[str, Harness] = {"pi": pi.program, "shell": shell.program}
CHECKS: dict[str, Check] = {"pi": pi.checked, "shell": shell.checked}
"""What ``program`` refuses on every machine, whether the agent program is installed or not."""


def program(spec: HarnessSpec, instruction: str, base_url: str) -> Program:
    """The program that works on ``instruction`` with the model at ``base_url`` (…/v1). Raises HarnessError."""
    if spec.name not in HARNESSES:
        raise HarnessError(f"harness {spec.name!r} is unknown: use one of {', '.join(sorted(HARNESSES))}")
    return HARNESSES[spec.name](spec.options, instruction, base_url)


__all__ = ["CHECKS", "HARNESSES", "Check", "Harness", "HarnessError", "program"]
