"""Group-normalised advantages, once per session.

A = (R − mean) / (std + ε) over the usable sessions of one group, std with n−1: GRPO (arXiv 2402.03300, eq. 3) with the
ε of verl and slime. Rewards belong to sessions, so every trace of a session gets that session's advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """The advantage of each session of one group, in the order of ``rewards``.

    Raises ValueError when fewer than two rewards are given, one is not finite, or all are equal: such a group teaches
    nothing, and whoever formed the batch should have left it out.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group needs two rewards to compare, not {len(rewards)}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if min(rewards) == max(rewards):
        raise ValueError(f"all {len(rewards)} rewards are {rewards[0]}: no variance")
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + EPSILON) for reward in rewards]
