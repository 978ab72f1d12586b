"""What the scheduler writes next, from what it knows: commands to nodes, and the closing records of groups.

Invariants, given that every decision is read back before the next one is made:
- On each node, prewarms in flight plus READY sessions never exceed its ready slots, and running ones never exceed its
  run slots; nor do running plus evaluated ones exceed its run slots plus postrun slots.
- A session is on one node at a time, and each Prewarm of it names a higher attempt, up to the task's ``max_attempts``.
- A train group is opened only while the policy's groups that were ever opened and not excluded, this one included, are
  at most (staleness_limit + version + 1) × batch_groups. (The rule of AReaL, arXiv 2505.24298, in whole groups.)
- A group is closed once, when each of its sessions has its final attempt.

Order: eval before train; sessions of groups that are open before new groups; new groups as they were submitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

import msgspec

from polar.scheduling.state import Group, Node, Session, Stage, State, session_id
from schemas.record import Record
from schemas.scheduling import Cancel, GroupSettled, Prewarm, Run
from schemas.tasks import Purpose, TaskSpec
from schemas.traces import GroupClosed, GroupMember


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How far sampling may run ahead of training: groups a batch, and the limit of staleness in versions."""

    batch_groups: int
    staleness_limit: int


@dataclass(slots=True)
class _Vacancy:
    """A node while a decision is made: free READY slots, and the share of its slots that is taken."""

    node: Node
    ready: int
    taken: int

    @property
    def load(self) -> float:
        registered = self.node.registered
        return self.taken / (registered.ready_slots + registered.run_slots)


@dataclass(slots=True, frozen=True)
class _Candidate:
    task: TaskSpec
    session_id: str
    sample_index: int
    attempt: int
    last_node: str


def decide(state: State, pace: Pace) -> list[Record]:
    """Everything that can be written now, in order. ``GroupClosed`` belongs on ``polar.traces``, the rest on
    ``polar.scheduler``; they are to be written together or not at all. Does not change ``state``.
    """
    return [*_closings(state), *_cancels(state), *_runs(state), *_prewarms(state, pace)]


def room(state: State, policy: str, pace: Pace) -> int:
    """How many more train groups of ``policy`` may be opened."""
    allowed = (pace.staleness_limit + state.versions.get(policy, 0) + 1) * pace.batch_groups
    return max(0, allowed - state.charged.get(policy, 0))


def _closings(state: State) -> Iterator[Record]:
    for group_id, group in state.open_groups.items():
        if group_id not in state.cancelled and not group.unsettled:
            yield from _close(group, [group.members[index] for index in range(group.task.num_samples)])
    for group_id, reason in state.cancelled.items():
        cancelled = state.groups.get(group_id)
        if cancelled is not None and not any(session.on_node for session in cancelled.unsettled.values()):
            yield from _close(cancelled, _cancelled_members(cancelled, reason))


def _close(group: Group, members: list[GroupMember]) -> Iterator[Record]:
    task = group.task
    yield GroupClosed(
        group_id=task.group_id, task_id=task.task_id, policy=task.policy, purpose=task.purpose, members=members
    )
    yield GroupSettled(group_id=task.group_id)


def _cancelled_members(group: Group, reason: str) -> list[GroupMember]:
    """A cancelled group is trained in no part: the sessions that happened to end before are no fair sample of it."""
    attempts = {session.sample_index: session.attempt for session in group.unsettled.values()}
    attempts |= {index: member.attempt for index, member in group.members.items()}
    return [
        GroupMember(
            session_id=session_id(group.task.task_id, index),
            attempt=attempts.get(index, 0),
            usable=False,
            reward=None,
            traces=0,
            reason=reason,
        )
        for index in range(group.task.num_samples)
    ]


def _cancels(state: State) -> Iterator[Cancel]:
    for group_id, reason in state.cancelled.items():
        group = state.groups.get(group_id)
        for session in group.unsettled.values() if group is not None else ():
            if session.on_node and not session.cancelling:
                yield Cancel(
                    node_id=session.node_id,
                    incarnation=session.incarnation,
                    session_id=session.session_id,
                    attempt=session.attempt,
                    reason=reason,
                )


def _count(node: Node, *stages: Stage) -> int:
    return sum(session.stage in stages for session in node.sessions.values())


def _runs(state: State) -> Iterator[Run]:
    for node_id, node in state.nodes.items():
        slots = node.registered
        running = _count(node, Stage.STARTING, Stage.RUNNING)
        free = min(
            slots.run_slots - running, slots.run_slots + slots.postrun_slots - running - _count(node, Stage.POSTRUN)
        )
        ready = [
            session
            for session in node.sessions.values()
            if session.stage == Stage.READY and session.group_id not in state.cancelled
        ]
        ready.sort(key=lambda session: state.groups[session.group_id].task.purpose != "eval")
        for session in ready[: max(0, free)]:
            yield Run(
                node_id=node_id,
                incarnation=slots.incarnation,
                session_id=session.session_id,
                attempt=session.attempt,
            )


def _prewarms(state: State, pace: Pace) -> Iterator[Prewarm]:
    vacancies = {
        node_id: _Vacancy(
            node=node,
            ready=node.registered.ready_slots - _count(node, Stage.PREWARMING, Stage.READY, Stage.STARTING),
            taken=len(node.sessions),
        )
        for node_id, node in state.nodes.items()
        if not node.draining
    }
    free = sum(max(0, vacancy.ready) for vacancy in vacancies.values())
    for candidate in islice(_candidates(state, pace), free):
        node_id, vacancy = _best(vacancies, candidate.last_node)
        vacancy.ready -= 1
        vacancy.taken += 1
        yield Prewarm(
            node_id=node_id,
            incarnation=vacancy.node.registered.incarnation,
            session_id=candidate.session_id,
            attempt=candidate.attempt,
            task=candidate.task,
            sample_index=candidate.sample_index,
        )


def _best(vacancies: dict[str, _Vacancy], last_node: str) -> tuple[str, _Vacancy]:
    """The least loaded node with a free READY slot; the one where the last attempt failed only if there is no other."""
    free = [(node_id, vacancy) for node_id, vacancy in vacancies.items() if vacancy.ready > 0]
    return min(free, key=lambda item: (item[0] == last_node, item[1].load, item[0]))


def _candidates(state: State, pace: Pace) -> Iterator[_Candidate]:
    """Sessions to dispatch, the most urgent first; lazily, so that only as many as there are slots are looked at."""
    purposes: tuple[Purpose, ...] = ("eval", "train")
    for purpose in purposes:
        for group_id, group in state.open_groups.items():
            if group.task.purpose == purpose and group_id not in state.cancelled:
                yield from (_again(group, session) for session in group.unsettled.values() if _waits(session))
        queues = [
            queue if purpose == "eval" else queue[: room(state, policy, pace)]
            for (kind, policy), queue in state.queues.items()
            if kind == purpose
        ]
        for _, group_id in merge(*queues):
            task = state.groups[group_id].task
            for index in range(task.num_samples):
                yield _Candidate(task, session_id(task.task_id, index), index, 1, "")


def _waits(session: Session) -> bool:
    return session.stage == Stage.WAITING


def _again(group: Group, session: Session) -> _Candidate:
    return _Candidate(group.task, session.session_id, session.sample_index, session.attempt + 1, session.node_id)
