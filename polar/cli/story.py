"""Records of the topics as lines that a person reads: time, id, attempt, what happened, tokens, reward."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import msgspec

from schemas.batches import BatchRecord, BatchSealed, BatchTrace, GroupExcluded
from schemas.dead_letters import DeadLetter
from schemas.packed import unpack_ids, unpack_logprobs
from schemas.record import Record
from schemas.scheduling import (
    NodeHeartbeat,
    NodeRecord,
    NodeRegistered,
    SchedulerRecord,
    SessionAssembled,
    SessionFinished,
)
from schemas.sessions import (
    CallCompleted,
    CallDelivery,
    CallFailed,
    CallStarted,
    HarnessExited,
    SessionClosed,
    SessionOpened,
    SessionRecord,
    SessionScored,
)
from schemas.tasks import TaskCancelled, TaskRecord, TaskSubmitted
from schemas.traces import GroupClosed, Trace, TraceRecord
from schemas.weights import WeightsLoaded, WeightsPublished, WeightsRecord

RECORDS: dict[str, Any] = {
    "polar.tasks": TaskRecord,
    "polar.scheduler": SchedulerRecord,
    "polar.sessions": SessionRecord,
    "polar.traces": TraceRecord,
    "polar.batches": BatchRecord,
    "polar.weights": WeightsRecord,
    "polar.dead-letters": DeadLetter,
}


class Tailed(msgspec.Struct):
    """One line of the admin API's tail."""

    topic: str
    partition: int
    offset: int
    key: str | None
    record: msgspec.Raw


def read(line: bytes) -> Record:
    """The record in one line of the tail. Raises msgspec.ValidationError for what is none of ours."""
    tailed = msgspec.json.decode(line, type=Tailed)
    record: Record = msgspec.json.decode(tailed.record, type=RECORDS[tailed.topic])
    return record


def short(identity: str) -> str:
    """The part of an id that tells it from others at a glance: the end of a UUIDv7, whose start is the time."""
    return identity[-8:] if len(identity) == 36 else identity[:24]


def line(record: Record) -> str:
    """``12:30:01.250  3f9a2c10  #1  call 2 completed   37 tokens …``"""
    return f"{record.at:%H:%M:%S}.{record.at.microsecond // 1000:03d}  {_who(record)}  {describe(record)}"


def _who(record: Record) -> str:
    session, attempt = getattr(record, "session_id", None), getattr(record, "attempt", None)
    if session is not None:
        return f"{short(session):<8}  #{attempt}"
    for name in ("node_id", "group_id", "task_id", "policy"):
        if (value := getattr(record, name, None)) is not None:
            return f"{short(value):<8}    "
    return " " * 12


@singledispatch
def describe(record: Record) -> str:
    """What happened, without who and when."""
    return _tag(record)


def _tag(record: Record) -> str:
    return str(record.__struct_config__.tag)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def said(message: dict[str, Any], width: int = 60) -> str:
    """A chat message in a few words: its text, then its tool calls."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or f"({part.get('type')})" for part in content]
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    text = " ".join(" ".join(part for part in parts if part).split())
    return text if len(text) <= width else text[: width - 1] + "…"


@describe.register
def _(record: SessionOpened) -> str:
    task = f"{record.purpose} task {short(record.task_id)}, sample {record.sample_index}"
    return f"opened             {record.harness} on {record.node_id}, {task}"


@describe.register
def _(record: HarnessExited) -> str:
    how = "deadline reached" if record.timed_out else f"exit code {record.exit_code}"
    return f"agent exited       {how}, {record.seconds:.1f} s"


@describe.register
def _(record: SessionScored) -> str:
    if record.reward is None:
        return f"NOT scored         {record.evaluator}: {record.error}"
    return f"scored             reward {record.reward:g} ({record.evaluator})"


@describe.register
def _(record: SessionClosed) -> str:
    return f"closed             {record.outcome}{_because(record.reason)}"


@describe.register
def _(record: CallStarted) -> str:
    prompt = _prompt(record) or "prompt not told yet"
    note = f", template history: {record.history_note}" if record.history_note else ""
    history = ", exact history" if record.history == "exact" else note
    streamed = ", streamed" if record.streamed else ""
    auxiliary = f", {record.auxiliary}" if record.auxiliary else ""
    return f"{f'call {record.number} started':<19}{prompt}{history}{streamed}{auxiliary}"


def _prompt(record: CallStarted | CallCompleted) -> str:
    """Empty where another event tells the prompt."""
    if record.prompt_ids is None:
        return ""
    kept = f" after {record.kept_ids} known" if record.kept_ids else ""
    return f"{len(unpack_ids(record.prompt_ids))} prompt tokens{kept}"


@describe.register
def _(record: CallCompleted) -> str:
    logprobs = unpack_logprobs(record.logprobs)
    versions = ", ".join(f"v{span.version}" for span in record.weight_versions)
    mean = f", mean log-prob {logprobs.mean():.3f}" if len(logprobs) else ""
    prompt = f"{_prompt(record)}, " if record.prompt_ids is not None else ""
    sampled = f"{prompt}{len(logprobs)} tokens by {versions}{mean}, {record.finish_reason}"
    return f"call completed     {sampled}: {said(record.message)}"


@describe.register
def _(record: CallDelivery) -> str:
    return "call delivered" if record.delivered else "call NOT delivered: the client had gone"


@describe.register
def _(record: CallFailed) -> str:
    fault = "infrastructure" if record.infrastructure else "client"
    return f"call FAILED        {record.reason} ({fault}){_because(record.detail)}"


@describe.register
def _(record: NodeRecord) -> str:
    return f"{_tag(record):<19}on {record.node_id}{_because(getattr(record, 'reason', ''))}"


@describe.register
def _(record: NodeRegistered) -> str:
    slots = f"{record.init_slots} init, {record.ready_slots} ready, {record.run_slots} run"
    return f"node registered    slots: {slots}, {record.postrun_slots} postrun"


@describe.register
def _(record: NodeHeartbeat) -> str:
    slots = f"{record.preparing} init, {record.ready} ready, {record.running} run"
    return f"heartbeat          {slots}, {record.postrun} postrun"


@describe.register
def _(record: SessionFinished) -> str:
    return f"finished           {record.outcome}{_because(record.reason)}"


@describe.register
def _(record: SessionAssembled) -> str:
    verdict = "usable" if record.usable else "infrastructure" if record.infrastructure else "unusable"
    reward = "" if record.reward is None else f", reward {record.reward:g}"
    return f"assembled          {verdict}, {record.traces} traces{reward}{_because(record.reason)}"


@describe.register
def _(record: TaskSubmitted) -> str:
    task = record.task
    what = f"{short(task.task_id)} {task.purpose}, {task.num_samples} samples"
    return f"submitted          {what}: {said({'content': task.instruction})}"


@describe.register
def _(record: TaskCancelled) -> str:
    return f"cancelled          {record.reason}"


@describe.register
def _(record: Trace) -> str:
    tokens = f"{len(unpack_ids(record.prompt_ids))}+{len(unpack_ids(record.response_ids))} tokens"
    return f"trace              {tokens}, {record.trained_tokens} trained, reward {record.reward:g}"


@describe.register
def _(record: GroupClosed) -> str:
    rewards = " ".join("–" if member.reward is None else f"{member.reward:g}" for member in record.members)
    return f"group closed       {record.purpose}, rewards {rewards}"


@describe.register
def _(record: BatchTrace) -> str:
    session = f"session {short(record.trace.session_id)}, reward {record.trace.reward:g}"
    return f"batch {record.batch}: trace {record.index} of {session}"


@describe.register
def _(record: BatchSealed) -> str:
    tokens = f"{record.trained_tokens} tokens of v{record.oldest_version}…v{record.newest_version}"
    return f"batch {record.batch} sealed: {len(record.groups)} groups, {record.traces} traces, {tokens}"


@describe.register
def _(record: GroupExcluded) -> str:
    return f"group excluded     {record.reason}{_because(record.detail)}"


@describe.register
def _(record: WeightsPublished) -> str:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
    return f"v{record.version} published       {metrics}"


@describe.register
def _(record: WeightsLoaded) -> str:
    difference = f"|engine − trainer| {record.probe_mean_difference:.1e}"
    return f"v{record.version} loaded by {record.engine_id} in {record.seconds:.2f} s, {difference}"


@describe.register
def _(record: DeadLetter) -> str:
    where = f"{record.topic}/{record.partition}@{record.offset}"
    return f"dead letter        {where} from {record.service}: {record.reason}"
