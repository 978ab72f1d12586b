"""``polar.sessions``: the whole story of each session, in order. Key: session_id.

The node writes opened, exited, scored and closed; the gateway writes what concerns calls.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from schemas.packed import unpack_ids, unpack_logprobs
from schemas.record import Record
from schemas.tasks import Purpose

Outcome = Literal["completed", "agent_timeout", "infrastructure", "cancelled"]


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` (included) to ``end`` (excluded) were sampled with this weight version."""

    version: int
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The effective parameters of the distribution that was sampled, as the engine resolved them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: list[str] = []
    seed: int | None = None
    altered: list[str] = []
    """Other parameters in effect that change the distribution: penalties, logit bias, structured output."""

    @property
    def reshapes(self) -> bool:
        """Whether the distribution is more than the softmax of logits / temperature."""
        cut = self.top_p != 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.temperature <= 0.0
        return cut or bool(self.altered)


class SessionEvent(Record, frozen=True, kw_only=True):
    """What every event of a session names."""

    session_id: str
    attempt: int


class SessionOpened(SessionEvent, frozen=True, kw_only=True, tag="session.opened"):
    task_id: str
    group_id: str
    sample_index: int
    policy: str
    purpose: Purpose
    harness: str
    builder: str
    node_id: str


class CallStarted(SessionEvent, frozen=True, kw_only=True, tag="call.started"):
    """A request that is about to be sampled. Where its texts held the session token, ``[token]`` stands.

    ``messages``, ``tools`` and ``prompt_ids`` hold what is new after the first ``kept_messages`` and ``kept_ids`` of
    call ``base_call_id`` (its prompt, then its response); without a base they are whole. ``tools`` is None where they
    are those of the base. ``prompt_ids`` is None where the engine tells the prompt only with its answer: then it
    stands in ``call.completed``.
    """

    call_id: str
    number: int
    dialect: str
    model: str
    streamed: bool
    messages: list[Any]
    tools: list[Any] | None
    prompt_ids: bytes | None
    sampling: Sampling
    base_call_id: str | None = None
    kept_messages: int = 0
    kept_ids: int = 0
    history: Literal["exact", "template"] = "template"
    """Whether the prompt goes on from the ids that ``base_call_id`` sampled, or is all the chat template's."""
    history_note: str | None = None
    """Why a prompt that could have been exact is the template's."""
    auxiliary: str | None = None
    """The rule that took this call for no turn of the agent (title, summary …); such a call is not trained."""
    parent_call_id: str | None = None
    """The call that this one goes on from: by the program's own headers, else the deepest one with the same history."""
    thread_id: str | None = None
    """The program's own id of the (sub-)agent that calls, where it sends one."""


class CallCompleted(SessionEvent, frozen=True, kw_only=True, tag="call.completed"):
    """What was sampled. ``response_ids`` holds every sampled token, the end-of-turn token included.

    ``prompt_ids``, ``base_call_id`` and ``kept_ids`` are as in ``call.started``, where that could not tell the prompt.

    Raises ValueError when the log-probs or the version spans do not cover the ids one to one.
    """

    call_id: str
    message: dict[str, Any]
    response_ids: bytes
    logprobs: bytes
    finish_reason: str
    weight_versions: list[VersionSpan]
    stop_reason: int | str | None = None
    usage: dict[str, Any] = {}
    prompt_ids: bytes | None = None
    base_call_id: str | None = None
    kept_ids: int = 0

    def __post_init__(self) -> None:
        ids, logprobs = unpack_ids(self.response_ids), unpack_logprobs(self.logprobs)
        if len(ids) != len(logprobs):
            raise ValueError(f"call {self.call_id}: {len(ids)} token ids but {len(logprobs)} log-probs")
        position = 0
        for span in self.weight_versions:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"call {self.call_id}: weight version spans leave a hole at token {position}")
            position = span.end
        if position != len(ids):
            raise ValueError(f"call {self.call_id}: weight versions cover {position} of {len(ids)} tokens")


class CallDelivery(SessionEvent, frozen=True, kw_only=True, tag="call.delivery"):
    """Whether the terminal event of a completed call was written to a client that was still there.

    An undelivered call may be told again as delivered: the program asked again and was given the same sample.
    """

    call_id: str
    delivered: bool


class CallFailed(SessionEvent, frozen=True, kw_only=True, tag="call.failed"):
    """A call that gave no usable sample. ``infrastructure`` faults are not the policy's: the session is not trained."""

    call_id: str
    reason: str
    infrastructure: bool
    detail: str = ""


class HarnessExited(SessionEvent, frozen=True, kw_only=True, tag="session.exited"):
    """The agent's process tree is gone. ``exit_code`` is None when a signal or the deadline ended it."""

    exit_code: int | None
    timed_out: bool
    seconds: float
    stdout: str = ""
    stderr: str = ""
    """The last few KiB of each."""


class SessionScored(SessionEvent, frozen=True, kw_only=True, tag="session.scored"):
    """``reward`` is finite, or None with an ``error``: an evaluator's own failure is no reward of 0."""

    reward: float | None
    evaluator: str
    error: str | None = None
    detail: dict[str, Any] = {}


class SessionClosed(SessionEvent, frozen=True, kw_only=True, tag="session.closed"):
    """The node's last word. Events of calls may still follow."""

    outcome: Outcome
    reason: str = ""


SessionRecord = (
    SessionOpened
    | CallStarted
    | CallCompleted
    | CallDelivery
    | CallFailed
    | HarnessExited
    | SessionScored
    | SessionClosed
)
