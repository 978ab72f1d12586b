"""What the scheduler knows: the fold of ``polar.tasks``, ``polar.scheduler``, ``polar.batches`` and ``polar.weights``.

Invariants:
- Only records change the state. The scheduler's own commands count when they are read back, never when they are
  written, so the state after a restart is the state without one.
- Topics may be read in any order relative to each other: only the order within ``polar.scheduler`` and within one
  task's records matters.
- A report counts only for the current attempt, from the incarnation that was told to run it; a stage never goes back.
- A session that leaves its node frees its slots, once.
- A settled group leaves the state; of it only its id stays, and each record costs constant time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any

from schemas.batches import GroupExcluded
from schemas.ids import derived_id
from schemas.record import Record
from schemas.scheduling import (
    Cancel,
    Drain,
    GroupSettled,
    NodeLost,
    NodeRegistered,
    Prewarm,
    Run,
    SessionAssembled,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
    SlotRecord,
)
from schemas.tasks import Purpose, TaskCancelled, TaskSpec, TaskSubmitted
from schemas.traces import GroupMember
from schemas.weights import WeightsPublished


class Stage(IntEnum):
    """Where the current attempt of a session is. From PREWARMING to POSTRUN it is on a node."""

    WAITING = 0
    PREWARMING = 1
    READY = 2
    STARTING = 3
    """Run is commanded, and not yet reported: the session counts for READY and for running."""
    RUNNING = 4
    POSTRUN = 5
    ASSEMBLING = 6
    """The node is done; the assembler's verdict is missing."""


@dataclass(slots=True)
class Session:
    """One sample of an open group that has no final attempt yet. ``attempt`` is 0 before the first."""

    session_id: str
    group_id: str
    sample_index: int
    attempt: int = 0
    stage: Stage = Stage.WAITING
    node_id: str = ""
    """The node of the current attempt or, while waiting, of the last one."""
    incarnation: str = ""
    ran: bool = False
    cancelling: bool = False
    verdict: SessionAssembled | None = None

    @property
    def on_node(self) -> bool:
        return Stage.PREWARMING <= self.stage <= Stage.POSTRUN


@dataclass(slots=True)
class Group:
    """A task that is not settled. ``unsettled`` and ``members`` are filled when its first Prewarm is read."""

    task: TaskSpec
    submitted: datetime | None = None
    opened: bool = False
    unsettled: dict[str, Session] = field(default_factory=dict)
    members: dict[int, GroupMember] = field(default_factory=dict)
    """Those with a final attempt, by sample index."""


@dataclass(slots=True)
class Node:
    """A process that runs sessions; ``sessions`` are those that occupy a slot, oldest first."""

    registered: NodeRegistered
    draining: bool = False
    sessions: dict[str, Session] = field(default_factory=dict)


Queue = list[tuple[datetime, str]]


@dataclass(slots=True)
class State:
    """Sessions, nodes and groups that are not done, and what is needed to recognise those that are."""

    nodes: dict[str, Node] = field(default_factory=dict)
    ended_incarnations: set[str] = field(default_factory=set)
    groups: dict[str, Group] = field(default_factory=dict)
    open_groups: dict[str, Group] = field(default_factory=dict)
    """Those of ``groups`` with a session that was dispatched, in the order of their first Prewarm."""
    queues: dict[tuple[Purpose, str], Queue] = field(default_factory=dict)
    """By purpose and policy, the groups that wait to be opened, as (time of submission, group id), sorted.

    ``polar.tasks`` has many partitions, thus no order among tasks: the stamped times stand in for one.
    """
    cancelled: dict[str, str] = field(default_factory=dict)
    """Groups that a client cancelled and that are not settled, with the reason."""
    settled: set[str] = field(default_factory=set)
    sessions: dict[str, Session] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """Newest published weight version by policy."""
    opened_train: set[str] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)
    charged: dict[str, int] = field(default_factory=dict)
    """By policy: train groups that were ever opened, less those that were excluded."""


def session_id(task_id: str, sample_index: int) -> str:
    """The same sample of a task is the same session, however often the log is read."""
    return derived_id("session", task_id, sample_index)


def evolve(state: State, record: Record) -> None:
    """Folds one record into ``state``, in place. Reading a record again changes nothing."""
    if (fold := _FOLDS.get(type(record))) is not None:
        fold(state, record)


def _submitted(state: State, record: TaskSubmitted) -> None:
    group_id = record.task.group_id
    if group_id in state.settled:
        return
    group = state.groups.setdefault(group_id, Group(record.task))
    if group.submitted is None:
        group.submitted = record.at
        if not group.opened and group_id not in state.cancelled:
            insort(state.queues.setdefault(_queue_key(group), []), (record.at, group_id))


def _queue_key(group: Group) -> tuple[Purpose, str]:
    return group.task.purpose, group.task.policy


def _unqueue(state: State, group_id: str, group: Group) -> None:
    queue = state.queues.get(_queue_key(group), [])
    if group.submitted is not None:
        entry = (group.submitted, group_id)
        position = bisect_left(queue, entry)
        if queue[position : position + 1] == [entry]:
            del queue[position]


def _cancelled(state: State, record: TaskCancelled) -> None:
    if record.task_id in state.settled or record.task_id in state.cancelled:
        return
    state.cancelled[record.task_id] = record.reason
    if (group := state.groups.get(record.task_id)) is not None:
        _unqueue(state, record.task_id, group)


def _published(state: State, record: WeightsPublished) -> None:
    state.versions[record.policy] = max(record.version, state.versions.get(record.policy, 0))


def _node(state: State, node_id: str, incarnation: str) -> Node | None:
    node = state.nodes.get(node_id)
    return node if node is not None and node.registered.incarnation == incarnation else None


def _registered(state: State, record: NodeRegistered) -> None:
    former = state.nodes.get(record.node_id)
    if record.incarnation in state.ended_incarnations:
        return
    if former is not None:
        if former.registered.incarnation == record.incarnation:
            return
        _end_incarnation(state, record.node_id, former.registered.incarnation)
    state.nodes[record.node_id] = Node(record)


def _lost(state: State, record: NodeLost) -> None:
    _end_incarnation(state, record.node_id, record.incarnation)


def _drained(state: State, record: Drain) -> None:
    if (node := _node(state, record.node_id, record.incarnation)) is not None:
        node.draining = True


def _end_incarnation(state: State, node_id: str, incarnation: str) -> None:
    state.ended_incarnations.add(incarnation)
    node = _node(state, node_id, incarnation)
    if node is None:
        return
    del state.nodes[node_id]
    for session in list(node.sessions.values()):
        _leave_node(state, session, Stage.WAITING)
        _conclude(state, session, f"node {node_id} was lost")


def _open(state: State, task: TaskSpec) -> Group:
    group = state.groups.setdefault(task.group_id, Group(task))
    if group.opened:
        return group
    _unqueue(state, task.group_id, group)
    group.opened = True
    state.open_groups[task.group_id] = group
    for index in range(task.num_samples):
        session = Session(session_id(task.task_id, index), task.group_id, index)
        group.unsettled[session.session_id] = state.sessions[session.session_id] = session
    if task.purpose == "train":
        state.opened_train.add(task.group_id)
        if task.group_id not in state.excluded:
            state.charged[task.policy] = state.charged.get(task.policy, 0) + 1
    return group


def _prewarm(state: State, record: Prewarm) -> None:
    if record.task.group_id in state.settled:
        return
    group = _open(state, record.task)
    node = _node(state, record.node_id, record.incarnation)
    if node is not None and node.draining:
        node = None
    member = group.members.get(record.sample_index)
    if node is not None and member is not None and record.attempt > member.attempt:
        _unsettle(state, group, record.sample_index)
    session = state.sessions.get(record.session_id)
    if session is None or record.attempt <= session.attempt:
        return
    session.attempt = record.attempt
    session.node_id, session.incarnation = record.node_id, record.incarnation
    session.ran, session.cancelling, session.verdict = False, False, None
    if node is None:
        _conclude(state, session, f"node {record.node_id} was lost or takes no further sessions")
        return
    session.stage = Stage.PREWARMING
    node.sessions[session.session_id] = session


def _unsettle(state: State, group: Group, sample_index: int) -> None:
    """The verdict on a lost attempt came between the decision to run the session again and its Prewarm.

    The node obeys that Prewarm, so the new attempt is the one that counts.
    """
    member = group.members.pop(sample_index)
    session = Session(member.session_id, group.task.group_id, sample_index, attempt=member.attempt)
    group.unsettled[session.session_id] = state.sessions[session.session_id] = session


def _slot(state: State, record: SlotRecord) -> None:
    session = state.sessions.get(record.session_id)
    if session is None or not session.on_node:
        return
    if (session.attempt, session.node_id, session.incarnation) != (record.attempt, record.node_id, record.incarnation):
        return
    match record:
        case Run() if session.stage == Stage.READY:
            session.stage = Stage.STARTING
        case Cancel():
            session.cancelling = True
        case SessionReady():
            session.stage = max(session.stage, Stage.READY)
        case SessionRunning():
            session.ran = True
            session.stage = max(session.stage, Stage.RUNNING)
        case SessionExited():
            session.ran = True
            session.stage = max(session.stage, Stage.POSTRUN)
        case SessionFinished():
            _finished(state, session, record)


def _leave_node(state: State, session: Session, stage: Stage) -> None:
    session.stage = stage
    session.cancelling = False
    if (node := _node(state, session.node_id, session.incarnation)) is not None:
        del node.sessions[session.session_id]


def _finished(state: State, session: Session, record: SessionFinished) -> None:
    """A session that never ran has no story, so the assembler has no verdict on it: it may run again."""
    if session.ran and session.verdict is None:
        _leave_node(state, session, Stage.ASSEMBLING)
    else:
        _leave_node(state, session, Stage.WAITING)
        _conclude(state, session, record.reason or record.outcome)


def _assembled(state: State, record: SessionAssembled) -> None:
    session = state.sessions.get(record.session_id)
    if session is None or session.attempt != record.attempt or session.verdict is not None:
        return
    if session.on_node:
        session.verdict = record
    elif session.stage == Stage.ASSEMBLING or record.usable or not record.infrastructure:
        session.verdict = record
        _conclude(state, session, record.reason)


def _conclude(state: State, session: Session, reason: str) -> None:
    """The attempt is over, off its node: the session gets its final verdict, or waits for the next attempt.

    No verdict means that the attempt was lost. ``reason`` says why, for an attempt that is not usable.
    """
    session.stage = Stage.WAITING
    group = state.groups[session.group_id]
    verdict = session.verdict
    lost = verdict is None or (verdict.infrastructure and not verdict.usable)
    if lost and session.attempt < group.task.max_attempts:
        session.verdict = None
        return
    usable = verdict is not None and verdict.usable
    if verdict is not None:
        reason = verdict.reason
    if lost:
        reason = f"{reason or 'infrastructure'} (attempt {session.attempt} was the last)"
    group.members[session.sample_index] = GroupMember(
        session_id=session.session_id,
        attempt=session.attempt,
        usable=usable,
        reward=verdict.reward if verdict is not None else None,
        traces=verdict.traces if verdict is not None else 0,
        reason=reason,
    )
    del group.unsettled[session.session_id], state.sessions[session.session_id]


def _settled(state: State, record: GroupSettled) -> None:
    group_id = record.group_id
    state.settled.add(group_id)
    group = state.groups.pop(group_id, None)
    state.open_groups.pop(group_id, None)
    state.cancelled.pop(group_id, None)
    if group is None:
        return
    _unqueue(state, group_id, group)
    for session in group.unsettled.values():
        del state.sessions[session.session_id]
        if session.on_node:
            _leave_node(state, session, Stage.WAITING)


def _excluded(state: State, record: GroupExcluded) -> None:
    if record.group_id in state.excluded:
        return
    state.excluded.add(record.group_id)
    if record.group_id in state.opened_train:
        state.charged[record.policy] = state.charged.get(record.policy, 0) - 1


_FOLDS: dict[type, Callable[[State, Any], None]] = {
    TaskSubmitted: _submitted,
    TaskCancelled: _cancelled,
    NodeRegistered: _registered,
    NodeLost: _lost,
    Drain: _drained,
    Prewarm: _prewarm,
    Run: _slot,
    Cancel: _slot,
    SessionReady: _slot,
    SessionRunning: _slot,
    SessionExited: _slot,
    SessionFinished: _slot,
    SessionAssembled: _assembled,
    GroupSettled: _settled,
    GroupExcluded: _excluded,
    WeightsPublished: _published,
}
