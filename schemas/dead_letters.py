"""``polar.dead-letters``: what could not be decoded or handled. Key: source topic."""

from __future__ import annotations

from schemas.record import Record


class DeadLetter(Record, frozen=True, kw_only=True, tag="dead_letter"):
    """The original bytes, where they came from, and why they were put aside."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    service: str
    reason: str
