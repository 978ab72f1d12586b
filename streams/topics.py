"""The one table of topics: partitions, configuration, which records each carries, and the key of a record.

Retention: a service that restarts folds ``polar.tasks``, ``polar.scheduler`` and ``polar.batches`` from their
beginning, so these are kept until a person shortens them; sessions, traces and dead letters are kept for 30 days.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from schemas.batches import BatchRecord
from schemas.dead_letters import DeadLetter
from schemas.record import Record
from schemas.scheduling import SchedulerRecord
from schemas.sessions import SessionRecord
from schemas.tasks import TaskCancelled, TaskRecord, TaskSubmitted
from schemas.traces import TraceRecord
from schemas.weights import WeightsLoaded, WeightsRecord

TASKS = "polar.tasks"
SCHEDULER = "polar.scheduler"
SESSIONS = "polar.sessions"
TRACES = "polar.traces"
BATCHES = "polar.batches"
WEIGHTS = "polar.weights"
DEAD_LETTERS = "polar.dead-letters"

MIB = 2**20
MANY = 6
"""Partitions of a topic that several members of a group may share; adding some later would move keys."""
FOREVER = -1
THIRTY_DAYS = 30 * 24 * 3600 * 1000


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``record``: the union of its types; ``max_bytes``: the largest value, uncompressed; ``key``: that of a record."""

    name: str
    partitions: int
    record: Any
    key: Callable[[Any], str]
    max_bytes: int = 8 * MIB
    retention_ms: int = FOREVER
    compact: bool = False

    @property
    def config(self) -> dict[str, str]:
        """What the topic is created with."""
        config = {
            "cleanup.policy": "compact" if self.compact else "delete",
            "compression.type": "producer",
            "max.message.bytes": str(self.max_bytes + MIB),
        }
        if not self.compact:
            config["retention.ms"] = str(self.retention_ms)
        return config


def _task_key(record: TaskSubmitted | TaskCancelled) -> str:
    return record.task.task_id if isinstance(record, TaskSubmitted) else record.task_id


def _scheduler_key(record: Any) -> str:
    for name in ("session_id", "node_id", "group_id"):
        if hasattr(record, name):
            return str(getattr(record, name))
    raise TypeError(f"{type(record).__name__} has no key")


def _weights_key(record: Record) -> str:
    if isinstance(record, WeightsLoaded):
        return f"{record.policy}/{record.engine_id}"
    return record.policy  # type: ignore[attr-defined]


_SPECS = (
    TopicSpec(name=TASKS, partitions=MANY, record=TaskRecord, key=_task_key),
    TopicSpec(name=SCHEDULER, partitions=1, record=SchedulerRecord, key=_scheduler_key),
    TopicSpec(
        name=SESSIONS,
        partitions=MANY,
        record=SessionRecord,
        key=lambda record: record.session_id,
        max_bytes=64 * MIB,
        retention_ms=THIRTY_DAYS,
    ),
    TopicSpec(
        name=TRACES,
        partitions=MANY,
        record=TraceRecord,
        key=lambda record: record.group_id,
        max_bytes=64 * MIB,
        retention_ms=THIRTY_DAYS,
    ),
    TopicSpec(name=BATCHES, partitions=1, record=BatchRecord, key=lambda record: record.policy, max_bytes=64 * MIB),
    TopicSpec(name=WEIGHTS, partitions=1, record=WeightsRecord, key=_weights_key, compact=True),
    # A dead letter holds its original in base64, a third larger.
    TopicSpec(
        name=DEAD_LETTERS,
        partitions=1,
        record=DeadLetter,
        key=lambda record: record.topic,
        max_bytes=90 * MIB,
        retention_ms=THIRTY_DAYS,
    ),
)

TABLE: dict[str, TopicSpec] = {spec.name: spec for spec in _SPECS}
