"""Makes the events of sessions for tests: what a node and a gateway would have published."""

from __future__ import annotations

import msgspec

from schemas.packed import pack_ids, pack_logprobs
from schemas.sessions import (
    CallCompleted,
    CallDelivery,
    CallFailed,
    CallStarted,
    HarnessExited,
    Sampling,
    SessionClosed,
    SessionOpened,
    SessionRecord,
    SessionScored,
    VersionSpan,
)


def opened(session="s", attempt=0, *, group="g", builder="prefix_merging", purpose="train") -> SessionOpened:
    return SessionOpened(
        session_id=session,
        attempt=attempt,
        task_id=group,
        group_id=group,
        sample_index=0,
        policy="policy",
        purpose=purpose,
        harness="shell",
        builder=builder,
        node_id="node-1",
    )


def started(number, prompt, session="s", attempt=0, *, base=None, kept=0, kept_messages=0, messages=(), **more):
    return CallStarted(
        session_id=session,
        attempt=attempt,
        call_id=f"{session}-{attempt}-c{number}",
        number=number,
        dialect="openai.chat",
        model="policy",
        streamed=True,
        messages=list(messages),
        tools=more.pop("tools", None),
        prompt_ids=pack_ids(prompt),
        sampling=more.pop("sampling", Sampling()),
        base_call_id=None if base is None else f"{session}-{attempt}-c{base}",
        kept_ids=kept,
        kept_messages=kept_messages,
        **more,
    )


def completed(number, response, session="s", attempt=0, *, logprobs=None, version=0, message=None) -> CallCompleted:
    return CallCompleted(
        session_id=session,
        attempt=attempt,
        call_id=f"{session}-{attempt}-c{number}",
        message=message or {"role": "assistant", "content": f"reply {number}"},
        response_ids=pack_ids(response),
        logprobs=pack_logprobs([-0.5 - i / 8 for i in range(len(response))] if logprobs is None else logprobs),
        finish_reason="stop",
        weight_versions=[VersionSpan(version, 0, len(response))] if len(response) else [],
    )


def delivery(number, delivered=True, session="s", attempt=0) -> CallDelivery:
    call_id = f"{session}-{attempt}-c{number}"
    return CallDelivery(session_id=session, attempt=attempt, call_id=call_id, delivered=delivered)


def failed(number, session="s", attempt=0, *, infrastructure=True) -> CallFailed:
    return CallFailed(
        session_id=session,
        attempt=attempt,
        call_id=f"{session}-{attempt}-c{number}",
        reason="engine_error",
        infrastructure=infrastructure,
    )


def call(number, prompt, response, session="s", attempt=0, **more) -> list[SessionRecord]:
    """A whole call that was delivered."""
    return [
        started(number, prompt, session, attempt, **more),
        completed(number, response, session, attempt),
        delivery(number, True, session, attempt),
    ]


def ending(session="s", attempt=0, *, reward=1.0, error=None, outcome="completed") -> list[SessionRecord]:
    return [
        HarnessExited(session_id=session, attempt=attempt, exit_code=0, timed_out=False, seconds=1.5),
        SessionScored(session_id=session, attempt=attempt, reward=reward, evaluator="command", error=error),
        SessionClosed(session_id=session, attempt=attempt, outcome=outcome),
    ]


def session(name: str, group: str = "g", *, calls: int = 3, reward: float = 1.0, attempt=0) -> list[SessionRecord]:
    """A conversation of ``calls`` turns with a tool result between them, as differences to the call before."""
    records: list[SessionRecord] = [opened(name, attempt, group=group)]
    length = 0
    seed = sum(map(ord, name))
    for number in range(1, calls + 1):
        new = [(seed * 7 + number * 13 + i) % 50 for i in range(4)]
        response = [(seed * 3 + number * 11 + i) % 50 + 50 for i in range(5)]
        base = None if number == 1 else number - 1
        records += call(number, new, response, name, attempt, base=base, kept=length)
        length += len(new) + len(response)
    return records + ending(name, attempt, reward=reward)


def fold(records, session="s"):
    from polar.trajectories import Story

    story = Story(session)
    for record in records:
        story.add(record)
    return story


def same(a, b) -> bool:
    """Equal as bytes on a topic."""
    return msgspec.json.encode(a) == msgspec.json.encode(b)
