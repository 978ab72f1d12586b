"""What a demo run found, as ``result.json`` holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polar.demo.config import DemoConfig

PASS_REWARD = 1.0
Z_95 = 1.959964
"""The standard normal's 97.5 % quantile."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """``passed`` of ``sessions`` scored ones; ``unscored`` had a fault of infrastructure and count for nothing."""

    version: int
    sessions: int
    passed: int
    unscored: int
    seconds: float

    @property
    def pass_at_1(self) -> float:
        """One sample a task, so the share of sessions that passed. NaN without a scored session."""
        return self.passed / self.sessions if self.sessions else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval of the share."""
        return wilson(self.passed, self.sessions)


def wilson(passed: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927, eq. 4 in the usual form). (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = passed / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def evaluation(members: Sequence[dict[str, Any]], version: int, seconds: float) -> Evaluation:
    """From the members of closed groups. A session that is not usable was not the policy's doing."""
    scored = [member["reward"] for member in members if member["usable"] and member["reward"] is not None]
    return Evaluation(
        version=version,
        sessions=len(scored),
        passed=sum(reward >= PASS_REWARD for reward in scored),
        unscored=len(members) - len(scored),
        seconds=seconds,
    )


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The mismatches are means of |difference| in nats over the run's versions; None where nothing was measured."""

    config: DemoConfig
    run_dir: str
    before: Evaluation
    after: Evaluation
    pass_at_1_before: float
    pass_at_1_after: float
    version: int
    seconds: float
    mismatch_engine_trainer: float | None
    mismatch_captured_recomputed: float | None
    groups_trained: int
    groups_excluded: dict[str, int]
    restarts: dict[str, int]


def write_result(path: Path, result: DemoResult) -> None:
    """As JSON, whole or not at all; NaN becomes null."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    fresh.replace(path)
