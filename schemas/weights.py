"""``polar.weights``: weights published by the trainer, and loaded by engines.

Key: the policy for published, ``policy/engine_id`` for loaded, so that compaction keeps the last of each.
"""

from __future__ import annotations

import msgspec

from schemas.record import Record


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed prompt and the trainer's log-prob (temperature 1) of each of its tokens after the first.

    ``prompt_ids`` has n tokens (int32), ``logprobs`` n−1 (float32): entry i belongs to token i+1.
    """

    prompt_ids: bytes
    logprobs: bytes


class WeightsPublished(Record, frozen=True, kw_only=True, tag="weights.published"):
    """Version ``version`` (0 is the base model) lies in the folder ``path``; ``sha256`` is of its model.safetensors.

    ``metrics`` are those of the step that made it (loss, kl, grad_norm, logprob_mismatch, reward_mean …).
    """

    policy: str
    version: int
    path: str
    sha256: str
    probe: Probe
    metrics: dict[str, float] = {}


class WeightsLoaded(Record, frozen=True, kw_only=True, tag="weights.loaded"):
    """Engine ``engine_id`` samples from ``version``; the differences are |engine − trainer| over the probe, in nats."""

    policy: str
    version: int
    engine_id: str
    probe_mean_difference: float
    probe_max_difference: float
    seconds: float


WeightsRecord = WeightsPublished | WeightsLoaded
