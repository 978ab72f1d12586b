"""The verdict on a session's attempt, and its traces: what the assembler writes, as a pure function of the story.

Records carry the time at which the session was closed, so the same story always gives the same bytes.
"""

from __future__ import annotations

import math

import msgspec

from polar.trajectories.builders import BUILDERS, Sequenced
from polar.trajectories.calls import BrokenCall, Call, TooLarge, check_logprobs, whole_calls
from polar.trajectories.story import Story
from schemas.ids import trace_id
from schemas.packed import pack_ids, pack_logprobs, pack_mask
from schemas.scheduling import SessionAssembled
from schemas.traces import Trace

RESHAPED = "sampling reshapes the distribution (top_p, top_k, min_p or temperature 0): its log-probs cannot be trained"

MAX_TRACE_TOKENS = 4_000_000
"""Of prompt and response together: at twelve bytes a token this stays below what ``polar.traces`` takes (64 MiB)."""


class Assembly(msgspec.Struct, frozen=True):
    """What becomes of one attempt: its traces (none unless usable), then the verdict."""

    traces: list[Trace]
    verdict: SessionAssembled


class Unusable(Exception):
    """The attempt is not trained; ``infrastructure`` faults are dispatched again."""

    def __init__(self, reason: str, *, infrastructure: bool) -> None:
        super().__init__(reason)
        self.reason, self.infrastructure = reason, infrastructure


def assemble(story: Story) -> Assembly:
    """The traces and the verdict. Calls without an end are taken as lost: call it when the story is complete,
    or no longer waited for. Raises ValueError for a story that was never opened or never closed.
    """
    if story.opened is None or story.closed is None:
        raise ValueError(f"session {story.session_id} attempt {story.attempt} is not closed")
    try:
        traces = _traces(story)
    except Unusable as fault:
        return Assembly([], _verdict(story, traces=0, fault=fault))
    return Assembly(traces, _verdict(story, traces=len(traces)))


def unusable(story: Story, reason: str, *, infrastructure: bool) -> Assembly:
    """The verdict on an attempt that is given up, for ``reason``. Raises ValueError where it was never opened."""
    return Assembly([], _verdict(story, traces=0, fault=Unusable(reason, infrastructure=infrastructure)))


def _verdict(story: Story, *, traces: int, fault: Unusable | None = None) -> SessionAssembled:
    if story.opened is None:
        raise ValueError(f"session {story.session_id} attempt {story.attempt} was never opened")
    reward = story.scored.reward if story.scored is not None else None
    return SessionAssembled(
        at=story.closed.at if story.closed is not None else story.opened.at,
        session_id=story.session_id,
        attempt=story.attempt,
        group_id=story.opened.group_id,
        usable=fault is None,
        infrastructure=fault is not None and fault.infrastructure,
        reward=reward if reward is not None and math.isfinite(reward) else None,
        traces=traces,
        reason="" if fault is None else fault.reason,
    )


def _traces(story: Story) -> list[Trace]:
    """Raises Unusable with the reason that comes first: how it ended, its score, its calls."""
    opened = story.opened
    assert opened is not None
    _check_ending(story)
    reward = _reward(story)
    try:
        calls = whole_calls(story)
        for call in calls:
            check_logprobs(call)
    except TooLarge as large:
        raise Unusable(str(large), infrastructure=False) from None
    except BrokenCall as broken:
        raise Unusable(str(broken), infrastructure=True) from None
    _check_calls(story, calls)
    if opened.builder not in BUILDERS:
        raise Unusable(f"no builder is named {opened.builder!r}", infrastructure=False)
    sequences = BUILDERS[opened.builder](calls)
    for sequence in sequences:
        if (tokens := len(sequence.prompt_ids) + len(sequence.response_ids)) > MAX_TRACE_TOKENS:
            raise Unusable(f"a trace of {tokens} tokens is larger than {MAX_TRACE_TOKENS}", infrastructure=False)
    return [_trace(story, branch, sequence, reward) for branch, sequence in enumerate(sequences)]


def _check_ending(story: Story) -> None:
    assert story.closed is not None
    outcome, reason = story.closed.outcome, story.closed.reason
    if outcome == "infrastructure":
        raise Unusable(reason or "a fault of the infrastructure", infrastructure=True)
    if outcome == "cancelled":
        raise Unusable(f"cancelled: {reason}" if reason else "cancelled", infrastructure=False)


def _reward(story: Story) -> float:
    scored = story.scored
    if scored is None:
        raise Unusable("the session was never scored", infrastructure=True)
    if scored.error is not None or scored.reward is None or not math.isfinite(scored.reward):
        raise Unusable(f"evaluator {scored.evaluator}: {scored.error or 'it gave no reward'}", infrastructure=True)
    return scored.reward


def _check_calls(story: Story, calls: list[Call]) -> None:
    if not calls:
        raise Unusable("the harness made no model call", infrastructure=True)
    last_received = max((i for i, call in enumerate(calls) if call.delivered), default=-1)
    for call in calls[last_received + 1 :]:
        link = story.calls[call.call_id]
        if link.lost:
            raise Unusable(f"call {call.number} was lost: it started and never ended", infrastructure=True)
        if link.completed is not None and link.delivery is None:
            raise Unusable(f"call {call.number}: whether the harness received it is not known", infrastructure=True)
        if link.failed is not None and link.completed is None and link.failed.infrastructure:
            raise Unusable(f"call {call.number} failed: {link.failed.reason}", infrastructure=True)
    for call in calls:
        if call.trained and call.sampling.reshapes:
            raise Unusable(
                "sampling reshapes the distribution (top_p, top_k, min_p or temperature 0)", infrastructure=False
            )


def _trace(story: Story, branch: int, sequence: Sequenced, reward: float) -> Trace:
    opened, closed = story.opened, story.closed
    assert opened is not None and closed is not None
    return Trace(
        at=closed.at,
        trace_id=trace_id(story.session_id, story.attempt, opened.builder, branch),
        session_id=story.session_id,
        attempt=story.attempt,
        group_id=opened.group_id,
        task_id=opened.task_id,
        policy=opened.policy,
        purpose=opened.purpose,
        harness=opened.harness,
        builder=opened.builder,
        branch=branch,
        prompt_ids=pack_ids(sequence.prompt_ids),
        response_ids=pack_ids(sequence.response_ids),
        loss_mask=pack_mask(sequence.loss_mask),
        logprobs=pack_logprobs(sequence.logprobs),
        spans=sequence.spans,
        reward=reward,
        finish_reason=sequence.calls[-1].finish_reason or "",
        notes=sequence.notes,
    )
