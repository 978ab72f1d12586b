"""Traces and closed groups for tests of the batcher."""

from __future__ import annotations

from schemas.ids import trace_id
from schemas.packed import pack_ids, pack_logprobs, pack_mask
from schemas.traces import GroupClosed, GroupMember, SampledSpan, Trace

POLICY = "policy"


def trace(
    group: str,
    session: str,
    *,
    attempt: int = 1,
    branch: int = 0,
    reward: float = 1.0,
    version: int = 0,
    purpose: str = "train",
    trained: int = 2,
    policy: str = POLICY,
) -> Trace:
    """Three response tokens, the first ``trained`` of them trained."""
    return Trace(
        trace_id=trace_id(session, attempt, "prefix_merging", branch),
        session_id=session,
        attempt=attempt,
        group_id=group,
        task_id=group,
        policy=policy,
        purpose=purpose,
        harness="shell",
        builder="prefix_merging",
        branch=branch,
        prompt_ids=pack_ids([1, 2]),
        response_ids=pack_ids([3, 4, 5]),
        loss_mask=pack_mask([1] * trained + [0] * (3 - trained)),
        logprobs=pack_logprobs([-0.5] * trained + [0.0] * (3 - trained)),
        spans=[SampledSpan(start=0, end=3, version=version, call_id="c")],
        reward=reward,
        finish_reason="stop",
    )


def member(session: str, *, attempt: int = 1, reward: float | None = 1.0, traces: int = 1) -> GroupMember:
    return GroupMember(
        session_id=session,
        attempt=attempt,
        usable=reward is not None,
        reward=reward,
        traces=traces,
        reason="" if reward is not None else "infrastructure",
    )


def closed(group: str, members: list[GroupMember], *, purpose: str = "train", policy: str = POLICY) -> GroupClosed:
    return GroupClosed(group_id=group, task_id=group, policy=policy, purpose=purpose, members=members)


def whole_group(group: str, *, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0, **fields) -> list:
    """The records of a group of one trace a session: the traces, then the closing record."""
    sessions = [f"{group}-s{index}" for index in range(len(rewards))]
    traces = [
        trace(group, session, reward=reward, version=version, **fields)
        for session, reward in zip(sessions, rewards, strict=True)
    ]
    members = [member(session, reward=reward) for session, reward in zip(sessions, rewards, strict=True)]
    return [*traces, closed(group, members, purpose=fields.get("purpose", "train"))]
