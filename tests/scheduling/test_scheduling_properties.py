"""The decider under any order of events, duplicates, losses, node deaths and restarts."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World, facts, refold

from polar.scheduling.decider import Pace, decide
from schemas.record import Record
from schemas.tasks import TaskSubmitted

PICK = st.integers(0, 7)


def told(records: list[Record]) -> list[Record]:
    """Records without the clock that stamped them."""
    return [msgspec.structs.replace(record, at=None) for record in records]


class Scheduling(RuleBasedStateMachine):
    @initialize(groups=st.integers(1, 2), staleness=st.integers(0, 1), nodes=st.integers(1, 3))
    def begin(self, groups: int, staleness: int, nodes: int) -> None:
        self.world = World(Pace(batch_groups=groups, staleness_limit=staleness), nodes)

    @precondition(lambda self: len(self.world.tasks) < 8)
    @rule(samples=st.integers(1, 4), purpose=st.sampled_from(["train", "train", "eval"]), attempts=st.integers(1, 3))
    def submit(self, samples: int, purpose: str, attempts: int) -> None:
        self.world.submit(samples, purpose, attempts)

    @rule(choice=PICK)
    def cancel(self, choice: int) -> None:
        self.world.cancel(choice)

    @rule(topic=st.sampled_from(["tasks", "scheduler", "batches", "weights"]), records=st.integers(1, 9))
    def read(self, topic: str, records: int) -> None:
        self.world.fold_some(topic, records)

    @rule()
    def read_and_decide(self) -> None:
        self.world.fold_all()
        self.world.decide()

    @rule()
    def decide(self) -> None:
        self.world.decide()

    @rule(seed=st.integers(0, 2**16))
    def restart_scheduler(self, seed: int) -> None:
        self.world.restart_scheduler(random.Random(seed))

    @rule(choice=PICK, records=st.integers(1, 9))
    def obey(self, choice: int, records: int) -> None:
        process = self.world.processes[choice % len(self.world.processes)]
        for _ in range(records):
            self.world.obey(process)

    @rule(choice=PICK, session=PICK, fails=st.sampled_from([False, False, False, True]))
    def advance(self, choice: int, session: int, fails: bool) -> None:
        self.world.advance(self.world.processes[choice % len(self.world.processes)], session, fails)

    @rule()
    def everybody_advances(self) -> None:
        for process in list(self.world.processes):
            while self.world.obey(process):
                pass
            self.world.advance(process, 0, fails=False)

    @rule(choice=PICK, verdict=st.sampled_from(["usable", "usable", "infrastructure", "unusable"]))
    def assemble(self, choice: int, verdict: str) -> None:
        self.world.assemble(choice, verdict)

    @rule(choice=PICK)
    def close_story_early(self, choice: int) -> None:
        self.world.close_story_early(choice)

    @rule(exclude=st.booleans())
    def judge(self, exclude: bool) -> None:
        self.world.judge(exclude)

    @rule(choice=PICK)
    def kill_node(self, choice: int) -> None:
        self.world.kill(choice)

    @rule(choice=PICK)
    def restart_node(self, choice: int) -> None:
        process = self.world.processes[choice % len(self.world.processes)]
        for other in self.world.processes:
            if other.node_id == process.node_id:
                other.alive = False
        self.world.start_process(process.node_id)

    @rule(choice=PICK)
    def lose_node(self, choice: int) -> None:
        self.world.lose_node(choice)

    @rule(choice=st.integers(0, 200))
    def repeat(self, choice: int) -> None:
        self.world.repeat(choice)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_current_sessions()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        rebuilt = refold(world, random.Random(len(world.scheduler)))
        assert facts(rebuilt) == facts(world.truth)
        assert told(decide(rebuilt, world.pace)) == told(decide(world.truth, world.pace))
        world.settle()
        world.check()
        submitted = {record.task.task_id for record in world.tasks if isinstance(record, TaskSubmitted)}
        closed = {group.group_id: group for group in world.closed}
        assert submitted == closed.keys(), "a group is never closed"
        assert not world.truth.sessions and not world.truth.groups, "state of a settled group is kept"
        assert not any(node.sessions for node in world.truth.nodes.values()), "a slot is leaked"
        assert not any(process.held for process in world.processes if process.alive), "a sandbox is leaked"
        for group in closed.values():
            indexes = Counter(member.session_id for member in group.members)
            assert set(indexes.values()) == {1}
            for member in group.members:
                assert not member.usable or world.ran[member.session_id, member.attempt] == 1


Scheduling.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduling = Scheduling.TestCase
