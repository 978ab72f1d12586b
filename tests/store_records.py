"""The records of a small run for tests of the store: a task, a node, sessions, a batch, weights."""

from __future__ import annotations

from session_stories import fold, session

from polar.trajectories import assemble
from schemas.batches import BatchGroup, BatchSealed, BatchTrace, GroupExcluded, SessionReward
from schemas.packed import pack_ids, pack_logprobs
from schemas.record import Record
from schemas.scheduling import (
    NodeHeartbeat,
    NodeRegistered,
    Prewarm,
    Run,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
)
from schemas.tasks import EvaluatorSpec, TaskSpec, TaskSubmitted
from schemas.traces import GroupClosed, GroupMember
from schemas.weights import Probe, WeightsLoaded, WeightsPublished

TASK = TaskSpec(task_id="g", instruction="count the files", evaluator=EvaluatorSpec(command="true"), num_samples=2)
REWARDS = {"s0": 1.0, "s1": 0.0}


def registered(incarnation="i1") -> NodeRegistered:
    return NodeRegistered(
        node_id="node-1", incarnation=incarnation, init_slots=1, ready_slots=2, run_slots=3, postrun_slots=4
    )


def slot(kind, session_id, attempt=0, incarnation="i1", **more):
    return kind(node_id="node-1", incarnation=incarnation, session_id=session_id, attempt=attempt, **more)


def prewarm(session_id, attempt=0, incarnation="i1", sample_index=0) -> Prewarm:
    return slot(Prewarm, session_id, attempt, incarnation, task=TASK, sample_index=sample_index)


def run_of(session_id) -> list[Record]:
    """A session's way through the stages of its node."""
    return [
        prewarm(session_id),
        slot(SessionReady, session_id),
        slot(Run, session_id),
        slot(SessionRunning, session_id),
        slot(SessionExited, session_id),
        slot(SessionFinished, session_id, outcome="completed"),
    ]


def published(version: int) -> WeightsPublished:
    probe = Probe(prompt_ids=pack_ids([1, 2]), logprobs=pack_logprobs([-1.0]))
    metrics = {"loss": 0.5, "reward_mean": 0.5} if version else {}
    return WeightsPublished(
        policy="policy", version=version, path=f"/v{version}", sha256="ab", probe=probe, metrics=metrics
    )


def loaded(version: int, engine="engine-1") -> WeightsLoaded:
    return WeightsLoaded(
        policy="policy",
        version=version,
        engine_id=engine,
        probe_mean_difference=1e-5,
        probe_max_difference=2e-5,
        seconds=0.5,
    )


def whole_run() -> dict[str, list[Record]]:
    """By topic (partition 0), in order: two sessions of one group, batch 1, weights 0 and 1; and a group left out."""
    stories = {name: session(name, "g", reward=reward) for name, reward in REWARDS.items()}
    assemblies = [assemble(fold(story, name)) for name, story in stories.items()]
    traces = [trace for assembly in assemblies for trace in assembly.traces]
    members = [
        GroupMember(session_id=name, attempt=0, usable=True, reward=reward, traces=1)
        for name, reward in REWARDS.items()
    ]
    group = BatchGroup(group_id="g", sessions=[SessionReward(name, reward) for name, reward in REWARDS.items()])
    sealed = BatchSealed(
        policy="policy", batch=1, traces=2, trained_tokens=30, groups=[group], oldest_version=0, newest_version=0
    )
    return {
        "polar.tasks": [TaskSubmitted(task=TASK)],
        "polar.scheduler": [
            registered(),
            NodeHeartbeat(node_id="node-1", incarnation="i1"),
            *run_of("s0"),
            *run_of("s1"),
            *[assembly.verdict for assembly in assemblies],
        ],
        "polar.sessions": [record for story in stories.values() for record in story],
        "polar.traces": [
            *traces,
            GroupClosed(group_id="g", task_id="g", policy="policy", purpose="train", members=members),
        ],
        "polar.batches": [
            *[BatchTrace(policy="policy", batch=1, index=i, trace=trace) for i, trace in enumerate(traces)],
            sealed,
            GroupExcluded(policy="policy", group_id="other", reason="no_variance", detail="all 0"),
        ],
        "polar.weights": [published(0), loaded(0), published(1), loaded(1)],
    }


def positioned(run: dict[str, list[Record]]) -> list[tuple[str, int, int, Record]]:
    """As ``Store.apply`` takes them."""
    return [(topic, 0, offset, record) for topic, records in run.items() for offset, record in enumerate(records)]
