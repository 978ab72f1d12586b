"""``polar.batches``: the traces of batch k, then its seal, in one Kafka transaction. Key: policy. One partition."""

from __future__ import annotations

import msgspec

from schemas.record import Record
from schemas.traces import Trace


class BatchTrace(Record, frozen=True, kw_only=True, tag="batch.trace"):
    """Trace ``index`` (0, 1, …) of batch ``batch`` (1, 2, 3, … without gaps)."""

    policy: str
    batch: int
    index: int
    trace: Trace


class SessionReward(msgspec.Struct, frozen=True):
    session_id: str
    reward: float


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A whole group of the batch: every usable session with its reward, also one whose traces hold no trained token."""

    group_id: str
    sessions: list[SessionReward]


class BatchSealed(Record, frozen=True, kw_only=True, tag="batch.sealed"):
    """Ends batch ``batch``. Training on it makes weight version ``batch``."""

    policy: str
    batch: int
    traces: int
    trained_tokens: int
    groups: list[BatchGroup]
    oldest_version: int
    newest_version: int


class GroupExcluded(Record, frozen=True, kw_only=True, tag="batch.group_excluded"):
    """A train group that is in no batch, and why: no_variance, stale, no_usable_session, no_trained_token,
    traces_missing (fewer traces could be read than the group's closing record names)."""

    policy: str
    group_id: str
    reason: str
    detail: str = ""


BatchRecord = BatchTrace | BatchSealed | GroupExcluded
