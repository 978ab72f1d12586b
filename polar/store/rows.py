"""What the store answers with. Times are UTC and for people; log-probs in nats; None where it is not known (yet)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One row of an answer."""


class NodeStatus(Answer, frozen=True, kw_only=True):
    """The newest incarnation of a node: its slots by stage, and how many are in use by its own reports."""

    node_id: str
    incarnation: str
    lost: bool
    registered_at: datetime
    heartbeat_at: datetime | None
    init_slots: int
    ready_slots: int
    run_slots: int
    postrun_slots: int
    preparing: int
    ready: int
    running: int
    postrun: int


class StepRow(Answer, frozen=True, kw_only=True):
    """The optimizer step that made weight version ``version``, with the trainer's own metrics."""

    policy: str
    version: int
    at: datetime
    metrics: dict[str, float]


class Status(Answer, frozen=True, kw_only=True):
    """The whole system at one glance. Void attempts are left out.

    ``unusable``, ``exclusions``: how many sessions and groups, by reason. ``splits``: of how many calls, those of void
    attempts too, the prompt is the template's where it might have been exact, by reason. ``reward_mean`` is over the
    last 64 usable train sessions. The probe differences are those of the newest load.
    """

    nodes: list[NodeStatus]
    ready: int
    running: int
    sessions: dict[str, int]
    unusable: dict[str, int]
    groups: dict[str, int]
    exclusions: dict[str, int]
    tasks: int
    cancelled_tasks: int
    traces: int
    last_batch: int
    version_published: int | None
    versions_loaded: dict[str, int]
    probe_mean_difference: float | None
    probe_max_difference: float | None
    step: StepRow | None
    reward_mean: float | None
    splits: dict[str, int] = {}


class TaskRow(Answer, frozen=True, kw_only=True):
    """A task with its sessions (void ones left out): ``done`` have their verdict, ``usable`` may be trained."""

    task_id: str
    policy: str
    purpose: str
    instruction: str
    harness: str
    builder: str
    num_samples: int
    submitted_at: datetime
    cancelled: bool
    cancel_reason: str | None
    sessions: int
    done: int
    usable: int
    reward_mean: float | None
    spec: dict[str, Any]


class SessionRow(Answer, frozen=True, kw_only=True):
    """One attempt of a session. ``reason`` is that of its verdict.

    ``state``: preparing, ready, starting, running, postrun, finished (no verdict yet), lost, cancelled, usable,
    unusable or infrastructure.
    """

    session_id: str
    attempt: int
    void: bool
    state: str
    task_id: str
    group_id: str
    sample_index: int
    policy: str
    purpose: str
    harness: str
    builder: str
    node_id: str | None
    at: datetime
    opened_at: datetime | None
    closed_at: datetime | None
    outcome: str | None
    outcome_reason: str | None
    exit_code: int | None
    timed_out: bool | None
    seconds: float | None
    reward: float | None
    evaluator: str | None
    evaluator_error: str | None
    usable: bool | None
    infrastructure: bool | None
    reason: str | None
    calls: int
    sampled_tokens: int
    traces: int
    oldest_version: int | None
    newest_version: int | None


class EventRow(Answer, frozen=True, kw_only=True):
    """One step of a session's story: the type of the record, and a line for people."""

    at: datetime
    attempt: int
    type: str
    text: str


class CallRow(Answer, frozen=True, kw_only=True):
    """One call, as it was recorded: ``messages`` are what is new after the ``kept_messages`` of ``base_call_id``.

    Its prompt is ``kept_ids`` ids of ``prompt_base_call_id``, then ``new_prompt_tokens`` of its own; these are None
    until an event tells them. ``parent_call_id`` is the call it goes on from, ``thread_id`` the program's name for the
    (sub-)agent that calls. ``history``: exact or template, with the reason in ``history_note`` where it might have been
    exact. ``auxiliary`` is the rule that took it for no turn of the agent. ``sampling`` is what was in effect.
    ``state``: started, completed (delivery not known yet), delivered (once, of however many tries), undelivered or
    failed.
    """

    session_id: str
    attempt: int
    call_id: str
    number: int
    at: datetime
    dialect: str
    model: str
    streamed: bool
    auxiliary: str | None
    parent_call_id: str | None
    thread_id: str | None
    history: str | None
    history_note: str | None
    base_call_id: str | None
    kept_messages: int
    prompt_base_call_id: str | None
    kept_ids: int | None
    new_prompt_tokens: int | None
    messages: list[Any]
    tools: list[Any] | None
    sampling: dict[str, Any]
    state: str
    message: dict[str, Any] | None
    response_tokens: int | None
    finish_reason: str | None
    stop_reason: str | None
    versions: list[dict[str, int]]
    mean_logprob: float | None
    usage: dict[str, Any]
    completed_at: datetime | None
    failure: str | None
    failure_detail: str | None
    infrastructure: bool | None


class GroupRow(Answer, frozen=True, kw_only=True):
    """``batch`` is the one that trained it, ``excluded`` the reason why none will; ``members`` once it is closed."""

    group_id: str
    task_id: str
    policy: str
    purpose: str
    closed_at: datetime | None
    sessions: int
    usable: int
    reward_mean: float | None
    reward_std: float | None
    batch: int | None
    excluded: str | None
    members: list[dict[str, Any]]


class TraceRow(Answer, frozen=True, kw_only=True):
    """A trace without its token arrays. ``versions`` are those of its trained tokens."""

    trace_id: str
    session_id: str
    attempt: int
    group_id: str
    task_id: str
    policy: str
    purpose: str
    harness: str
    builder: str
    branch: int
    at: datetime
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    versions: list[int]
    reward: float
    finish_reason: str
    notes: list[str]
    batch: int | None


class TraceTokens(Answer, frozen=True, kw_only=True):
    """A trace with its arrays: prompt (p,), and response, mask and log-probs of shape (r,)."""

    trace: TraceRow
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[dict[str, Any]]


class SessionStory(Answer, frozen=True, kw_only=True):
    """All attempts of a session, what happened, its calls by number and its traces."""

    attempts: list[SessionRow]
    events: list[EventRow]
    calls: list[CallRow]
    traces: list[TraceRow]


class BatchRow(Answer, frozen=True, kw_only=True):
    policy: str
    batch: int
    at: datetime
    traces: int
    trained_tokens: int
    groups: int
    sessions: int
    reward_mean: float | None
    oldest_version: int
    newest_version: int


class LoadRow(Answer, frozen=True, kw_only=True):
    engine_id: str
    at: datetime
    probe_mean_difference: float
    probe_max_difference: float
    seconds: float


class WeightRow(Answer, frozen=True, kw_only=True):
    """A published weight version, and the engines that loaded it."""

    policy: str
    version: int
    at: datetime
    path: str
    sha256: str
    metrics: dict[str, float]
    loads: list[LoadRow]


class ExclusionRow(Answer, frozen=True, kw_only=True):
    policy: str
    group_id: str
    at: datetime
    reason: str
    detail: str


class TaskPass(Answer, frozen=True, kw_only=True):
    task_id: str
    sessions: int
    passed: int
    mean_reward: float


class PassAt1(Answer, frozen=True, kw_only=True):
    """``pass_at_1`` is the mean over tasks of passed / sessions: None without a session."""

    purpose: str
    pass_at_1: float | None
    mean_reward: float | None
    tasks: int
    sessions: int
    passed: int
    by_task: list[TaskPass]
