"""From records to rows: which tables a record belongs to, and the key that makes its row one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas import batches, scheduling, sessions, tasks, traces, weights
from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask
from schemas.record import Record

Row = dict[str, Any]

ATTEMPT = ("session_id", "attempt")
KEYS: dict[str, tuple[str, ...]] = {
    "task_submissions": ("task_id",),
    "task_cancellations": ("task_id",),
    "node_registrations": ("node_id", "incarnation"),
    "node_losses": ("node_id", "incarnation"),
    "node_heartbeats": ("node_id",),
    "session_plans": ATTEMPT,
    "session_stages": (*ATTEMPT, "stage"),
    "session_openings": ATTEMPT,
    "session_exits": ATTEMPT,
    "session_scores": ATTEMPT,
    "session_closings": ATTEMPT,
    "session_verdicts": ATTEMPT,
    "call_starts": ("call_id",),
    "call_ends": ("call_id",),
    "call_deliveries": ("call_id", "delivered"),
    "call_failures": ("call_id",),
    "traces": ("trace_id",),
    "group_closings": ("group_id",),
    "batches": ("policy", "batch"),
    "batch_traces": ("policy", "batch", "index"),
    "batch_groups": ("group_id",),
    "exclusions": ("group_id",),
    "weights": ("policy", "version"),
    "weight_loads": ("policy", "version", "engine_id", "position"),
}
"""What must not come twice. The first row of a key stays, whatever is delivered again.

A call may be told as undelivered and, given again to a program that asked again, as delivered: both rows stay.
"""

REPLACED = frozenset({"node_heartbeats"})
"""Tables of which only the newest row of a key matters."""

STAGES: dict[type[Record], int] = {
    scheduling.SessionReady: 1,
    scheduling.Run: 2,
    scheduling.SessionRunning: 3,
    scheduling.SessionExited: 4,
    scheduling.SessionFinished: 5,
}


def rows(record: Record, offset: int) -> Iterator[tuple[str, Row]]:
    """The rows of ``record``, each with its table; none for records that the store does not keep."""
    match record:
        case tasks.TaskSubmitted() | tasks.TaskCancelled():
            yield _task(record)
        case sessions.CallStarted() | sessions.CallCompleted() | sessions.CallDelivery() | sessions.CallFailed():
            yield _call(record)
        case sessions.SessionEvent():
            yield _session(record)
        case scheduling.SlotRecord() | scheduling.SessionAssembled():
            yield from _attempt(record)
        case scheduling.NodeRecord():
            yield from _node(record, offset)
        case traces.Trace() | traces.GroupClosed():
            yield _trace(record)
        case _:
            yield from _training(record, offset)


def _fields(record: Record, without: tuple[str, ...] = ()) -> Row:
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in without}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _about(task: tasks.TaskSpec) -> Row:
    return {
        "task_id": task.task_id,
        "policy": task.policy,
        "purpose": task.purpose,
        "harness": task.harness.name,
        "builder": task.builder,
    }


def _task(record: tasks.TaskSubmitted | tasks.TaskCancelled) -> tuple[str, Row]:
    if isinstance(record, tasks.TaskCancelled):
        return "task_cancellations", _fields(record)
    task = record.task
    more = {"instruction": task.instruction, "num_samples": task.num_samples, "spec_json": _json(task)}
    return "task_submissions", {"at": record.at} | _about(task) | more


def _session(record: sessions.SessionEvent) -> tuple[str, Row]:
    if isinstance(record, sessions.SessionScored):
        return "session_scores", _fields(record, without=("detail",)) | {"detail_json": _json(record.detail)}
    if isinstance(record, sessions.HarnessExited):
        return "session_exits", _fields(record)
    return "session_openings" if isinstance(record, sessions.SessionOpened) else "session_closings", _fields(record)


def _call(record: sessions.SessionRecord) -> tuple[str, Row]:
    match record:
        case sessions.CallStarted():
            return "call_starts", _fields(record, without=("messages", "tools", "prompt_ids", "sampling")) | {
                "messages_json": _json(record.messages),
                "tools_json": None if record.tools is None else _json(record.tools),
                "prompt_ids": _ids(record.prompt_ids),
                "sampling_json": _json(record.sampling),
            }
        case sessions.CallCompleted():
            return "call_ends", _completed(record)
        case sessions.CallDelivery():
            return "call_deliveries", _fields(record)
        case _:
            return "call_failures", _fields(record)


def _ids(packed: bytes | None) -> NDArray[np.int32] | None:
    return None if packed is None else unpack_ids(packed)


def _completed(record: sessions.CallCompleted) -> Row:
    logprobs = unpack_logprobs(record.logprobs)
    versions = [span.version for span in record.weight_versions]
    return _fields(record, without=("message", "weight_versions", "usage")) | {
        "message_json": _json(record.message),
        "prompt_ids": _ids(record.prompt_ids),
        "response_ids": unpack_ids(record.response_ids),
        "logprobs": logprobs,
        "response_tokens": len(logprobs),
        "mean_logprob": float(np.mean(logprobs)) if len(logprobs) else None,
        "stop_reason": None if record.stop_reason is None else str(record.stop_reason),
        "versions": [msgspec.structs.asdict(span) for span in record.weight_versions],
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "usage_json": _json(record.usage),
    }


def _attempt(record: scheduling.SlotRecord | scheduling.SessionAssembled) -> Iterator[tuple[str, Row]]:
    if isinstance(record, scheduling.SessionAssembled):
        yield "session_verdicts", _fields(record)
    elif isinstance(record, scheduling.Prewarm):
        yield (
            "session_plans",
            _fields(record, without=("task",)) | _about(record.task) | {"group_id": record.task.group_id},
        )
    elif type(record) in STAGES:
        yield (
            "session_stages",
            {
                "session_id": record.session_id,
                "attempt": record.attempt,
                "stage": STAGES[type(record)],
                "type": str(record.__struct_config__.tag),
                "at": record.at,
                "node_id": record.node_id,
                "outcome": getattr(record, "outcome", None),
                "reason": getattr(record, "reason", None),
            },
        )


def _node(record: scheduling.NodeRecord, offset: int) -> Iterator[tuple[str, Row]]:
    match record:
        case scheduling.NodeRegistered():
            yield "node_registrations", _fields(record) | {"position": offset}
        case scheduling.NodeLost():
            yield "node_losses", _fields(record)
        case scheduling.NodeHeartbeat():
            yield "node_heartbeats", {name: getattr(record, name) for name in ("node_id", "incarnation", "at")}


def _trace(record: traces.Trace | traces.GroupClosed) -> tuple[str, Row]:
    if isinstance(record, traces.GroupClosed):
        members = [msgspec.structs.asdict(member) for member in record.members]
        return "group_closings", _fields(record) | {"members": members}
    prompt_ids, response_ids = unpack_ids(record.prompt_ids), unpack_ids(record.response_ids)
    return "traces", _fields(record) | {
        "prompt_tokens": len(prompt_ids),
        "response_tokens": len(response_ids),
        "trained_tokens": record.trained_tokens,
        "versions": record.versions,
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "loss_mask": unpack_mask(record.loss_mask),
        "logprobs": unpack_logprobs(record.logprobs),
        "spans": [msgspec.structs.asdict(span) for span in record.spans],
    }


def _training(record: Record, offset: int) -> Iterator[tuple[str, Row]]:
    match record:
        case batches.BatchSealed():
            yield from _seal(record)
        case batches.BatchTrace():
            names = {"policy": record.policy, "batch": record.batch, "index": record.index}
            yield "batch_traces", names | {"trace_id": record.trace.trace_id}
        case batches.GroupExcluded():
            yield "exclusions", _fields(record)
        case weights.WeightsPublished():
            yield "weights", _fields(record, without=("probe", "metrics")) | {"metrics_json": _json(record.metrics)}
        case weights.WeightsLoaded():
            yield "weight_loads", _fields(record) | {"position": offset}


def _seal(record: batches.BatchSealed) -> Iterator[tuple[str, Row]]:
    rewards = [session.reward for group in record.groups for session in group.sessions]
    yield (
        "batches",
        _fields(record, without=("groups",))
        | {
            "groups": len(record.groups),
            "sessions": len(rewards),
            "reward_mean": float(np.mean(rewards)) if rewards else None,
        },
    )
    for group in record.groups:
        yield "batch_groups", {"policy": record.policy, "batch": record.batch, "group_id": group.group_id}
