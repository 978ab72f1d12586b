"""From traces and closed groups to numbered batches, by policy.

``state`` is made from the batches topic (``resume``: what was sealed or excluded), then from the traces topic
(``evolve``: one record, what is to be written because of it). The caller writes each action, together with
``safe_offsets``, in one transaction before it evolves further.

Invariants:
- A train group is in one batch, or is excluded with a reason, once; an eval group is in none, silently.
- A policy's batches are numbered 1, 2, 3, … and each holds ``batch_groups`` whole groups, in the order of closing.
- Of a group, the traces of the attempts that its closing record names are taken, each id once, ordered by session id,
  then branch.
- No trained token of batch k has a version below (k − 1) − staleness_limit.
- Starting again from any ``safe_offsets`` that were written, with all that was sealed and excluded, goes on as if
  nothing had happened.
- In memory are the traces of open train groups and of fewer than ``batch_groups`` closed ones per policy, which the
  scheduler's rule bounds; of a session, only those of its highest attempt seen.

Worked example, batch_groups 2, last seal 4: groups A (rewards 0, 1), B (1, 1), C (0, 1) close. A waits, B is excluded
(no_variance), C completes batch 5 with A; a token of version 4 − staleness_limit or newer was needed in each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from schemas.batches import BatchGroup, BatchSealed, BatchTrace, GroupExcluded, SessionReward
from schemas.record import Record
from schemas.traces import GroupClosed, GroupMember, Trace


@dataclass(slots=True)
class Pending:
    """A train group that is neither sealed nor excluded. ``first_offset`` is that of its oldest record."""

    partition: int
    first_offset: int
    traces: dict[str, Trace] = field(default_factory=dict)
    """By trace id, of each session's highest attempt."""
    attempts: dict[str, int] = field(default_factory=dict)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A closed group that may be trained: its usable sessions and their traces with trained tokens, in order."""

    group_id: str
    sessions: list[SessionReward]
    traces: list[Trace]

    @property
    def oldest_version(self) -> int:
        return min(trace.versions[0] for trace in self.traces)

    @property
    def newest_version(self) -> int:
        return max(trace.versions[-1] for trace in self.traces)


@dataclass(slots=True)
class State:
    """``sealed`` is the last batch by policy, ``done`` the groups that are sealed or excluded."""

    batch_groups: int
    staleness_limit: int
    sealed: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    pending: dict[str, Pending] = field(default_factory=dict)
    waiting: dict[str, list[Candidate]] = field(default_factory=dict)
    """By policy, closed groups for the next batch, in the order of closing; they stay in ``pending`` until sealed."""
    positions: dict[int, int] = field(default_factory=dict)
    """Next offset by partition, after what was evolved."""


class Batch(msgspec.Struct, frozen=True):
    """To be written whole, the seal last."""

    traces: list[BatchTrace]
    seal: BatchSealed


Action = Batch | GroupExcluded


def resume(state: State, record: Record) -> None:
    """Folds one record of the batches topic, traces left out, into ``state``."""
    if isinstance(record, GroupExcluded):
        state.done.add(record.group_id)
    elif isinstance(record, BatchSealed):
        state.sealed[record.policy] = max(record.batch, state.sealed.get(record.policy, 0))
        state.done.update(group.group_id for group in record.groups)


def evolve(state: State, partition: int, offset: int, record: Record) -> Action | None:
    """Folds the record at ``offset`` of the traces topic's ``partition`` into ``state``; returns what it brings about.

    The state already counts the action as written: after a failed write it must be built anew from the log.
    """
    action = None
    if isinstance(record, Trace):
        _keep(state, partition, offset, record)
    elif isinstance(record, GroupClosed):
        action = _close(state, partition, offset, record)
    state.positions[partition] = offset + 1
    return action


def safe_offsets(state: State) -> dict[int, int]:
    """By partition, where a later start may begin: at the oldest record of a group that is not done."""
    offsets = dict(state.positions)
    for pending in state.pending.values():
        offsets[pending.partition] = min(offsets[pending.partition], pending.first_offset)
    return offsets


def _keep(state: State, partition: int, offset: int, trace: Trace) -> None:
    if trace.purpose != "train" or trace.group_id in state.done or _is_waiting(state, trace.policy, trace.group_id):
        return
    pending = state.pending.setdefault(trace.group_id, Pending(partition, offset))
    known = pending.attempts.get(trace.session_id, trace.attempt)
    if trace.attempt < known:
        return
    if trace.attempt > known:
        pending.traces = {key: kept for key, kept in pending.traces.items() if kept.session_id != trace.session_id}
    pending.attempts[trace.session_id] = trace.attempt
    pending.traces.setdefault(trace.trace_id, trace)


def _is_waiting(state: State, policy: str, group_id: str) -> bool:
    return any(candidate.group_id == group_id for candidate in state.waiting.get(policy, ()))


def _close(state: State, partition: int, offset: int, closed: GroupClosed) -> Action | None:
    group_id, policy = closed.group_id, closed.policy
    if closed.purpose != "train" or group_id in state.done or _is_waiting(state, policy, group_id):
        return None
    pending = state.pending.setdefault(group_id, Pending(partition, offset))
    number = state.sealed.get(policy, 0) + 1
    judged = _judge(closed, list(pending.traces.values()), oldest_allowed=number - 1 - state.staleness_limit)
    if isinstance(judged, GroupExcluded):
        _done(state, group_id)
        return judged
    pending.traces = {}
    waiting = state.waiting.setdefault(policy, [])
    waiting.append(judged)
    if len(waiting) < state.batch_groups:
        return None
    state.waiting[policy] = []
    state.sealed[policy] = number
    for candidate in waiting:
        _done(state, candidate.group_id)
    return _seal(policy, number, waiting)


def _done(state: State, group_id: str) -> None:
    state.done.add(group_id)
    del state.pending[group_id]


def _judge(closed: GroupClosed, traces: list[Trace], oldest_allowed: int) -> Candidate | GroupExcluded:
    """Whether a closed group may be trained.

    ``oldest_allowed`` is of the next batch, which takes every group that waits: what is fresh enough now is so at its
    seal.
    """

    def excluded(reason: str, detail: str) -> GroupExcluded:
        return GroupExcluded(policy=closed.policy, group_id=closed.group_id, reason=reason, detail=detail)

    usable = sorted((m for m in closed.members if m.usable and m.reward is not None), key=lambda m: m.session_id)
    if not usable:
        return excluded("no_usable_session", _why_unusable(closed.members))
    sessions = [SessionReward(m.session_id, m.reward) for m in usable if m.reward is not None]
    rewards = {session.reward for session in sessions}
    if len(rewards) == 1:
        return excluded("no_variance", f"{len(sessions)} sessions of reward {rewards.pop():g}")
    attempts = {member.session_id: member.attempt for member in usable}
    named = [trace for trace in traces if attempts.get(trace.session_id) == trace.attempt]
    for member in usable:
        present = sum(trace.session_id == member.session_id for trace in named)
        if present != member.traces:
            return excluded("traces_missing", f"session {member.session_id}: {present} of {member.traces} traces")
    trained = sorted((t for t in named if t.trained_tokens), key=lambda t: (t.session_id, t.branch, t.trace_id))
    if not trained:
        return excluded("no_trained_token", f"{len(named)} traces")
    candidate = Candidate(group_id=closed.group_id, sessions=sessions, traces=trained)
    if candidate.oldest_version < oldest_allowed:
        return excluded("stale", f"version {candidate.oldest_version}, needed {oldest_allowed}")
    return candidate


def _why_unusable(members: list[GroupMember]) -> str:
    reasons: dict[str, int] = {}
    for member in members:
        reasons[member.reason or "no reason"] = reasons.get(member.reason or "no reason", 0) + 1
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.items())


def _seal(policy: str, number: int, groups: list[Candidate]) -> Batch:
    traces = [trace for group in groups for trace in group.traces]
    return Batch(
        traces=[
            BatchTrace(policy=policy, batch=number, index=index, trace=trace) for index, trace in enumerate(traces)
        ],
        seal=BatchSealed(
            policy=policy,
            batch=number,
            traces=len(traces),
            trained_tokens=sum(trace.trained_tokens for trace in traces),
            groups=[BatchGroup(group_id=group.group_id, sessions=group.sessions) for group in groups],
            oldest_version=min(group.oldest_version for group in groups),
            newest_version=max(group.newest_version for group in groups),
        ),
    )
