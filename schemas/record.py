"""The base of every record on a topic, and the schema version that goes with it.

A record is a frozen, tagged Struct: the JSON field ``type`` says which one it is.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

SCHEMA_VERSION = "1.0"
"""``major.minor``. A reader ignores unknown fields and refuses a newer major version."""


def now() -> datetime:
    """The producer's clock, UTC with microseconds; for people, never for order."""
    return datetime.now(UTC)


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Anything that is a Kafka value of ours. ``at`` is the producer's clock (UTC)."""

    at: datetime = msgspec.field(default_factory=now)
