"""``polar.traces``: finished traces, and a group's closing record. Key: group_id."""

from __future__ import annotations

import math

import msgspec

from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask
from schemas.record import Record
from schemas.tasks import Purpose


class SampledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Response tokens ``start`` (included) to ``end`` (excluded) came from one call, at one weight version."""

    start: int
    end: int
    version: int
    call_id: str
    temperature: float = 1.0


class Trace(Record, frozen=True, kw_only=True, tag="trace"):
    """One training sequence: ``prompt_ids`` then ``response_ids``.

    ``loss_mask``, ``logprobs`` have the length of ``response_ids``; log-probs are those of the sampling distribution,
    and 0 where the mask is 0. ``spans`` cover the tokens that were sampled, in order.
    Raises ValueError when lengths differ, the reward is not finite, or a trained token has no span.
    """

    trace_id: str
    session_id: str
    attempt: int
    group_id: str
    task_id: str
    policy: str
    purpose: Purpose
    harness: str
    builder: str
    branch: int
    prompt_ids: bytes
    response_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    spans: list[SampledSpan]
    reward: float
    finish_reason: str
    notes: list[str] = []

    def __post_init__(self) -> None:
        n = len(unpack_ids(self.response_ids))
        mask = unpack_mask(self.loss_mask)
        if len(mask) != n or len(unpack_logprobs(self.logprobs)) != n:
            raise ValueError(f"trace {self.trace_id}: mask, log-probs and response ids differ in length")
        if not math.isfinite(self.reward):
            raise ValueError(f"trace {self.trace_id}: the reward {self.reward} is not finite")
        uncovered = mask.astype(bool)
        for span in self.spans:
            uncovered[span.start : span.end] = False
        if uncovered.any():
            raise ValueError(f"trace {self.trace_id}: a trained token belongs to no sampled span")

    @property
    def trained_tokens(self) -> int:
        return int(unpack_mask(self.loss_mask).sum())

    @property
    def versions(self) -> list[int]:
        """The weight versions of its trained tokens, each once, ascending."""
        mask = unpack_mask(self.loss_mask)
        return sorted({s.version for s in self.spans if mask[s.start : s.end].any()})


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """How one session of a group ended: its last attempt, reward, number of traces."""

    session_id: str
    attempt: int
    usable: bool
    reward: float | None
    traces: int
    reason: str = ""


class GroupClosed(Record, frozen=True, kw_only=True, tag="group.closed"):
    """Written by the scheduler when every session of the group has its final attempt assembled.

    All traces of the named attempts stand before this record in the same partition; traces of other attempts are void.
    """

    group_id: str
    task_id: str
    policy: str
    purpose: Purpose
    members: list[GroupMember]


TraceRecord = Trace | GroupClosed
