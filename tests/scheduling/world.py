"""A small world for the decider: one log per topic, nodes that obey and report, an assembler, a batcher and a trainer.

The scheduler reads the log late, as a real one does; every choice (who moves next, what fails) is the test's.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from polar.scheduling.decider import Pace, decide
from polar.scheduling.state import Stage, State, evolve, session_id
from schemas.batches import GroupExcluded
from schemas.packed import pack_ids, pack_logprobs
from schemas.record import Record
from schemas.scheduling import (
    Cancel,
    NodeLost,
    NodeRegistered,
    Prewarm,
    Run,
    SessionAssembled,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
)
from schemas.tasks import EvaluatorSpec, TaskCancelled, TaskSpec, TaskSubmitted
from schemas.traces import GroupClosed
from schemas.weights import Probe, WeightsPublished

POLICY = "policy"
PROBE = Probe(prompt_ids=pack_ids([1]), logprobs=pack_logprobs([]))
READY_SLOTS, RUN_SLOTS, POSTRUN_SLOTS = 2, 2, 1


def task(task_id: str, samples: int = 2, **fields) -> TaskSpec:
    return TaskSpec(
        task_id=task_id, instruction="x", evaluator=EvaluatorSpec(command="true"), num_samples=samples, **fields
    )


def assembled(session: str, attempt: int, group: str, verdict: str = "usable") -> SessionAssembled:
    return SessionAssembled(
        session_id=session,
        attempt=attempt,
        group_id=group,
        usable=verdict == "usable",
        infrastructure=verdict == "infrastructure",
        reward=1.0 if verdict == "usable" else None,
        traces=1 if verdict == "usable" else 0,
        reason="" if verdict == "usable" else verdict,
    )


def registered(node_id: str, incarnation: str, ready: int = READY_SLOTS, run: int = RUN_SLOTS) -> NodeRegistered:
    return NodeRegistered(
        node_id=node_id,
        incarnation=incarnation,
        init_slots=2,
        ready_slots=ready,
        run_slots=run,
        postrun_slots=POSTRUN_SLOTS,
    )


def published(version: int) -> WeightsPublished:
    return WeightsPublished(policy=POLICY, version=version, path="/w", sha256="0", probe=PROBE)


@dataclass
class Process:
    """A node's process: what it holds, by (session, attempt), and how far it has read the scheduler's topic."""

    node_id: str
    incarnation: str
    position: int
    held: dict[tuple[str, int], str] = field(default_factory=dict)
    seen: set[tuple[str, int]] = field(default_factory=set)
    alive: bool = True

    def count(self, *stages: str) -> int:
        return sum(stage in stages for stage in self.held.values())


class World:
    """The log of each topic, and the processes around it. ``truth`` is the fold of everything written so far."""

    def __init__(self, pace: Pace, nodes: int = 2) -> None:
        self.pace = pace
        self.tasks: list[Record] = []
        self.scheduler: list[Record] = []
        self.batches: list[Record] = []
        self.weights: list[Record] = []
        self.closed: list[GroupClosed] = []
        self.truth = State()
        self.live = State()
        self.read = {name: 0 for name in ("tasks", "scheduler", "batches", "weights")}
        self.own_end = 0
        self.processes: list[Process] = []
        self.ran: Counter[tuple[str, int]] = Counter()
        self.to_assemble: dict[tuple[str, int], str] = {}
        self.group_of: dict[str, str] = {}
        self.version = 0
        self.judged: set[str] = set()
        self.opened_train: set[str] = set()
        self.waiting = 0
        self.started = 0
        for number in range(nodes):
            self.start_process(f"node-{number}")

    def write(self, topic: str, record: Record) -> None:
        getattr(self, topic).append(record)
        evolve(self.truth, record)

    # Clients

    def submit(self, samples: int, purpose: str, max_attempts: int) -> None:
        spec = task(f"task-{len(self.tasks):04}", samples, purpose=purpose, max_attempts=max_attempts)
        for index in range(samples):
            self.group_of[session_id(spec.task_id, index)] = spec.task_id
        self.write("tasks", TaskSubmitted(task=spec))

    def cancel(self, choice: int) -> None:
        submitted = [r.task.task_id for r in self.tasks if isinstance(r, TaskSubmitted)]
        if submitted:
            self.write("tasks", TaskCancelled(task_id=submitted[choice % len(submitted)]))

    # The scheduler

    def fold_some(self, topic: str, records: int) -> None:
        log = getattr(self, topic)
        end = min(len(log), self.read[topic] + records)
        for record in log[self.read[topic] : end]:
            evolve(self.live, record)
        self.read[topic] = end

    def fold_all(self) -> None:
        for topic in self.read:
            self.fold_some(topic, len(getattr(self, topic)))

    def decide(self) -> int:
        """Decides from what was read, if the last decision was read back. Returns how many records it wrote."""
        if self.read["scheduler"] < self.own_end:
            return 0
        decision = decide(self.live, self.pace)
        for record in decision:
            if isinstance(record, GroupClosed):
                self.closed.append(record)
            else:
                self.write("scheduler", record)
                if isinstance(record, Prewarm) and record.task.purpose == "train":
                    self.opened_train.add(record.task.task_id)
        if decision:
            self.own_end = len(self.scheduler)
        return len(decision)

    def restart_scheduler(self, rng: random.Random) -> None:
        self.live = refold(self, rng)
        self.read = {name: len(getattr(self, name)) for name in self.read}

    def lose_node(self, choice: int) -> None:
        nodes = list(self.live.nodes.values())
        if nodes and self.read["scheduler"] >= self.own_end:
            node = nodes[choice % len(nodes)].registered
            self.write("scheduler", NodeLost(node_id=node.node_id, incarnation=node.incarnation, reason="silent"))
            self.own_end = len(self.scheduler)

    # Nodes

    def start_process(self, node_id: str) -> None:
        self.started += 1
        process = Process(node_id, f"incarnation-{self.started}", len(self.scheduler))
        self.processes.append(process)
        self.write("scheduler", registered(node_id, process.incarnation))

    def kill(self, choice: int) -> None:
        alive = [process for process in self.processes if process.alive]
        if alive:
            alive[choice % len(alive)].alive = False

    def report(self, process: Process, kind: type, key: tuple[str, int], **fields) -> None:
        session, attempt = key
        self.write(
            "scheduler",
            kind(
                node_id=process.node_id,
                incarnation=process.incarnation,
                session_id=session,
                attempt=attempt,
                **fields,
            ),
        )

    def obey(self, process: Process) -> bool:
        """The process reads one record and does what it is told."""
        if not process.alive or process.position >= len(self.scheduler):
            return False
        record = self.scheduler[process.position]
        process.position += 1
        if getattr(record, "incarnation", None) != process.incarnation:
            return True
        match record:
            case NodeLost():
                process.alive = False
                self.start_process(process.node_id)
            case Prewarm():
                key = record.session_id, record.attempt
                if key not in process.seen:
                    process.seen.add(key)
                    process.held[key] = "init"
            case Run():
                key = record.session_id, record.attempt
                if process.held.get(key) == "ready":
                    process.held[key] = "running"
                    self.ran[key] += 1
                    self.report(process, SessionRunning, key)
            case Cancel():
                self.finish(process, (record.session_id, record.attempt), "cancelled")
        return True

    def finish(self, process: Process, key: tuple[str, int], outcome: str) -> None:
        stage = process.held.pop(key, None)
        if stage is None:
            return
        if stage == "running":
            self.report(process, SessionExited, key)
        if stage in ("running", "postrun"):
            self.to_assemble.setdefault(key, outcome)
        self.report(process, SessionFinished, key, outcome=outcome)

    def advance(self, process: Process, choice: int, fails: bool) -> bool:
        """One held session takes its next step."""
        movable = [key for key, stage in process.held.items() if stage != "ready"]
        if not process.alive or not movable:
            return False
        key = movable[choice % len(movable)]
        if fails:
            self.finish(process, key, "infrastructure")
        elif process.held[key] == "init":
            process.held[key] = "ready"
            self.report(process, SessionReady, key)
        elif process.held[key] == "running":
            process.held[key] = "postrun"
            self.report(process, SessionExited, key)
        else:
            self.finish(process, key, "completed")
        return True

    # Assembler, batcher, trainer

    def assemble(self, choice: int, verdict: str) -> bool:
        if not self.to_assemble:
            return False
        session, attempt = key = list(self.to_assemble)[choice % len(self.to_assemble)]
        if self.to_assemble.pop(key) == "infrastructure":
            verdict = "infrastructure"
        self.write("scheduler", assembled(session, attempt, self.group_of[session], verdict))
        return True

    def close_story_early(self, choice: int) -> None:
        """A session's events are complete before its node reports it as finished."""
        evaluated = [key for p in self.processes for key, stage in p.held.items() if stage == "postrun"]
        if evaluated:
            self.to_assemble.setdefault(evaluated[choice % len(evaluated)], "completed")
            self.assemble(len(self.to_assemble) - 1, "usable")

    def judge(self, exclude: bool) -> bool:
        """The batcher takes the next closed train group; a full batch is trained at once."""
        for group in self.closed:
            if group.purpose == "eval" or group.group_id in self.judged:
                continue
            self.judged.add(group.group_id)
            if exclude or not any(member.usable for member in group.members):
                self.write("batches", GroupExcluded(policy=POLICY, group_id=group.group_id, reason="no_variance"))
            else:
                self.waiting += 1
            if self.waiting == self.pace.batch_groups:
                self.waiting, self.version = 0, self.version + 1
                self.write("weights", published(self.version))
            return True
        return False

    def repeat(self, choice: int) -> None:
        """An old record stands on the topic once more."""
        if self.scheduler:
            self.write("scheduler", self.scheduler[choice % len(self.scheduler)])

    def settle(self) -> None:
        """Everybody works, nothing fails any more, until nothing moves."""
        for node_id in {process.node_id for process in self.processes}:
            if not any(p.alive and p.node_id == node_id for p in self.processes):
                self.start_process(node_id)
        for node_id, node in list(self.truth.nodes.items()):
            if not any(p.alive and p.incarnation == node.registered.incarnation for p in self.processes):
                record = NodeLost(node_id=node_id, incarnation=node.registered.incarnation, reason="silent")
                self.write("scheduler", record)
                self.start_process(node_id)
        moved = True
        while moved:
            self.fold_all()
            moved = self.decide() > 0
            for process in list(self.processes):
                while self.obey(process):
                    moved = True
                while self.advance(process, 0, fails=False):
                    moved = True
            while self.assemble(0, "usable"):
                moved = True
            while self.judge(exclude=False):
                moved = True

    # What must always hold

    def check(self) -> None:
        for process in self.processes:
            assert process.count("init", "ready") <= READY_SLOTS
            assert process.count("running") <= RUN_SLOTS
            assert process.count("running", "postrun") <= RUN_SLOTS + POSTRUN_SLOTS
        assert all(count == 1 for count in self.ran.values()), "an attempt ran twice"
        counted = [session for node in self.truth.nodes.values() for session in node.sessions]
        assert len(counted) == len(set(counted)), "a session is on two nodes"
        for node in self.truth.nodes.values():
            stages = Counter(session.stage for session in node.sessions.values())
            assert stages[Stage.PREWARMING] + stages[Stage.READY] + stages[Stage.STARTING] <= READY_SLOTS
            assert stages[Stage.STARTING] + stages[Stage.RUNNING] <= RUN_SLOTS
            assert all(session.on_node for session in node.sessions.values())
        closed = Counter(group.group_id for group in self.closed)
        assert all(count == 1 for count in closed.values()), "a group was closed twice"
        allowed = (self.pace.staleness_limit + self.version + 1) * self.pace.batch_groups
        excluded = {record.group_id for record in self.batches}
        assert len(self.opened_train - excluded) <= allowed, "more groups are open than allowed"
        current = {node.registered.incarnation for node in self.truth.nodes.values()}
        held = [session for p in self.processes if p.alive and p.incarnation in current for session, _ in p.held]
        assert len(held) == len(set(held)), "two current processes hold one session"


def refold(world: World, rng: random.Random) -> State:
    """The state built anew, with the topics interleaved in another way."""
    state = State()
    rest = {name: iter(getattr(world, name)) for name in world.read}
    while rest:
        name = rng.choice(sorted(rest))
        record = next(rest[name], None)
        if record is None:
            del rest[name]
        else:
            evolve(state, record)
    return state


def facts(state: State) -> dict:
    """What two equal states agree on: all of it, the order of open groups and of sessions on nodes included."""
    return {
        "nodes": {
            node_id: (node.registered, node.draining, list(node.sessions.values()))
            for node_id, node in state.nodes.items()
        },
        "ended": state.ended_incarnations,
        "groups": state.groups,
        "open": list(state.open_groups),
        "queues": {key: queue for key, queue in state.queues.items() if queue},
        "cancelled": state.cancelled,
        "settled": state.settled,
        "sessions": state.sessions,
        "versions": state.versions,
        "charged": {policy: count for policy, count in state.charged.items() if count},
    }
