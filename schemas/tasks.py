"""``polar.tasks``: what a client asks for. Key: task_id."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.ids import new_id
from schemas.record import Record

Purpose = Literal["train", "eval"]
Seconds = Annotated[float, Meta(gt=0)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a task as a person writes it: an unknown field is a mistake, and is refused."""


class HarnessSpec(Spec, frozen=True, kw_only=True):
    """Which agent program runs. ``options`` are that preset's own (``polar/harnesses/``)."""

    name: str = "pi"
    options: dict[str, Any] = {}


class Limits(Spec, frozen=True, kw_only=True):
    """What a sandbox may use; sizes in MiB."""

    memory_mb: Annotated[int, Meta(ge=16)] = 2048
    processes: Annotated[int, Meta(ge=1)] = 256
    file_mb: Annotated[int, Meta(ge=1)] = 256


class RuntimeSpec(Spec, frozen=True, kw_only=True):
    """Where it runs. ``files`` (relative path → text) are written, then ``prepare`` commands run, during INIT."""

    kind: str = "local"
    limits: Limits = Limits()
    files: dict[str, str] = {}
    prepare: list[str] = []
    environment: dict[str, str] = {}


class EvaluatorSpec(Spec, frozen=True, kw_only=True):
    """How it is scored: ``command`` runs in the sandbox after the agent has ended.

    Exit code 0 is reward 1, any other is 0; with ``reward_file`` (relative to the work folder) the one number in
    that file is the reward instead.
    """

    kind: str = "command"
    command: str
    reward_file: str | None = None


class Deadlines(Spec, frozen=True, kw_only=True):
    """Seconds for each stage; each has its own clock."""

    init_s: Seconds = 60.0
    agent_s: Seconds = 600.0
    evaluation_s: Seconds = 120.0


class SamplingSpec(Spec, frozen=True, kw_only=True):
    """What a task fixes for each of its calls, whatever the agent program asks for. None: as the program asks, but
    for a task that trains: then the policy's own distribution is sampled (temperature and top_p 1, no top_k or min_p).

    ``top_k`` 0 is none. ``max_tokens`` is an upper limit. ``structured_outputs`` is vLLM's: one of ``json`` (a schema),
    ``regex``, ``choice`` or ``grammar``.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Annotated[list[str], Meta(max_length=16)] | None = None
    structured_outputs: dict[str, Any] | None = None


UNCUT: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The policy's own distribution."""


class Budget(Spec, frozen=True, kw_only=True):
    """What a session may use of the engine. ``tokens`` counts sampled ones; None: no limit."""

    calls: Annotated[int, Meta(ge=1)] | None = None
    tokens: Annotated[int, Meta(ge=1)] | None = None
    concurrent_calls: Annotated[int, Meta(ge=1)] = 16


class TaskSpec(Spec, frozen=True, kw_only=True):
    """One task. Its sessions (one per sample) form one group, whose id is the task's id."""

    instruction: str
    evaluator: EvaluatorSpec
    task_id: str = msgspec.field(default_factory=new_id)
    policy: str = "policy"
    purpose: Purpose = "train"
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 8
    harness: HarnessSpec = HarnessSpec()
    runtime: RuntimeSpec = RuntimeSpec()
    deadlines: Deadlines = Deadlines()
    sampling: SamplingSpec = SamplingSpec()
    budget: Budget = Budget()
    builder: str = "prefix_merging"
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    metadata: dict[str, str] = {}

    @property
    def group_id(self) -> str:
        return self.task_id

    @property
    def session_sampling(self) -> SamplingSpec:
        """What is fixed for each call: programs ask for temperatures and cuts whose log-probs cannot be trained."""
        if self.purpose != "train":
            return self.sampling
        own = msgspec.structs.asdict(self.sampling)
        fixed = {name: value for name, value in UNCUT.items() if own[name] is None}
        return msgspec.structs.replace(self.sampling, **fixed)

    def __post_init__(self) -> None:
        for name, seconds in msgspec.structs.asdict(self.deadlines).items():
            if not math.isfinite(seconds):
                raise ValueError(f"deadlines.{name} must be finite")


class TaskSubmitted(Record, frozen=True, kw_only=True, tag="task.submitted"):
    task: TaskSpec


class TaskCancelled(Record, frozen=True, kw_only=True, tag="task.cancelled"):
    task_id: str
    reason: str = "cancelled by the client"


TaskRecord = TaskSubmitted | TaskCancelled
