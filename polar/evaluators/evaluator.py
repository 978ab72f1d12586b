"""What an evaluator is: an async function from a sandbox whose agent has ended to a score."""

from __future__ import annotations

import math
from typing import Any, Protocol

import msgspec

from polar.runtimes.runtime import Sandbox
from schemas.tasks import EvaluatorSpec


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A finite ``reward``, or None with the ``error`` of an evaluator that failed: that is no reward of 0.

    Raises ValueError for any other combination.
    """

    reward: float | None
    error: str | None = None
    detail: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score has either a reward or an error")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward {self.reward} is not finite")


class Evaluator(Protocol):
    """Never raises for what an agent left behind. Raises RuntimeFault when the sandbox fails."""

    async def __call__(
        self, spec: EvaluatorSpec, sandbox: Sandbox, environment: dict[str, str], deadline_s: float
    ) -> Score: ...
