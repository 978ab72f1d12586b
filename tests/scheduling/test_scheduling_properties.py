"""The decider under any order of events, duplicates, losses, node deaths and restarts."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from world import Process, World, facts, refold

from polar.scheduling.decider import Pace, decide
from schemas.record import Record
from schemas.tasks import TaskSubmitted

MOVES = 250


def alive(world: World, rng: random.Random) -> Process:
    return rng.choice([process for process in world.processes if process.alive] or world.processes)


def submit(world: World, rng: random.Random) -> None:
    if len(world.tasks) < 40:
        world.submit(rng.randint(1, 5), rng.choice(["train", "train", "eval"]), rng.randint(1, 3))


def read_some(world: World, rng: random.Random) -> None:
    world.fold_some(rng.choice(["tasks", "scheduler", "batches", "weights"]), rng.randint(1, 9))


def decide_late(world: World, rng: random.Random) -> None:
    world.decide()


def decide_now(world: World, rng: random.Random) -> None:
    world.fold_all()
    world.decide()


def obey(world: World, rng: random.Random) -> None:
    process = alive(world, rng)
    for _ in range(rng.randint(1, 12)):
        world.obey(process)


def advance(world: World, rng: random.Random) -> None:
    world.advance(alive(world, rng), rng.randrange(8), fails=False)


def everybody_obeys(world: World, rng: random.Random) -> None:
    for process in list(world.processes):
        while world.obey(process):
            pass


def fail(world: World, rng: random.Random) -> None:
    world.advance(alive(world, rng), rng.randrange(8), fails=True)


def assemble(world: World, rng: random.Random) -> None:
    world.assemble(rng.randrange(8), rng.choice(["usable", "usable", "infrastructure", "unusable"]))


def close_story_early(world: World, rng: random.Random) -> None:
    world.close_story_early(rng.randrange(8))


def judge(world: World, rng: random.Random) -> None:
    world.judge(rng.random() < 0.4)


def cancel(world: World, rng: random.Random) -> None:
    world.cancel(rng.randrange(40))


def restart_scheduler(world: World, rng: random.Random) -> None:
    world.restart_scheduler(rng)


def kill_node(world: World, rng: random.Random) -> None:
    world.kill(rng.randrange(8))


def restart_node(world: World, rng: random.Random) -> None:
    node_id = rng.choice(world.processes).node_id
    for process in world.processes:
        process.alive = process.alive and process.node_id != node_id
    world.start_process(node_id)


def lose_node(world: World, rng: random.Random) -> None:
    world.lose_node(rng.randrange(8))


def repeat(world: World, rng: random.Random) -> None:
    world.repeat(rng.randrange(1000))


WORK = {
    submit: 4,
    read_some: 6,
    decide_late: 6,
    decide_now: 6,
    obey: 8,
    everybody_obeys: 4,
    advance: 16,
    assemble: 6,
    judge: 2,
}
TROUBLE = {
    fail: 2,
    close_story_early: 3,
    cancel: 1,
    restart_scheduler: 1,
    kill_node: 0.3,
    restart_node: 0.6,
    lose_node: 0.3,
    repeat: 5,
}


def told(records: list[Record]) -> list[Record]:
    """Records without the clock that stamped them."""
    return [msgspec.structs.replace(record, at=None) for record in records]


def check_end(world: World) -> None:
    """When everybody works again, all groups close, and nothing of them is left but their ids."""
    submitted = {record.task.task_id for record in world.tasks if isinstance(record, TaskSubmitted)}
    closed = {group.group_id: group for group in world.closed}
    assert submitted == closed.keys(), "a group is never closed"
    assert not world.truth.sessions and not world.truth.groups, "state of a settled group is kept"
    assert not any(node.sessions for node in world.truth.nodes.values()), "a slot is leaked"
    assert not any(process.held for process in world.processes if process.alive), "a sandbox is leaked"
    for group in closed.values():
        assert len({member.session_id for member in group.members}) == len(group.members)
        for member in group.members:
            assert not member.usable or world.ran[member.session_id, member.attempt] == 1


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pace=st.builds(Pace, batch_groups=st.integers(1, 2), staleness_limit=st.integers(0, 1)),
    nodes=st.integers(1, 3),
    troubles=st.sets(st.sampled_from(list(TROUBLE)), max_size=4),
)
def test_slots_limits_attempts_and_groups_hold_whatever_happens(seed, pace, nodes, troubles):
    """Each example allows a few kinds of trouble, so that some let the work go far and others hardly begin."""
    rng, world = random.Random(seed), World(pace, nodes)
    weights = WORK | {trouble: TROUBLE[trouble] for trouble in troubles}
    for move in rng.choices(list(weights), list(weights.values()), k=MOVES):
        move(world, rng)
        world.check()
    rebuilt = refold(world, rng)
    assert facts(rebuilt) == facts(world.truth)
    assert told(decide(rebuilt, pace)) == told(decide(world.truth, pace))
    world.settle()
    world.check()
    check_end(world)


def test_the_simulation_reaches_what_it_is_about():
    """Attempts beyond the first, closed train groups and weight versions: else the property would say little."""
    rng, world = random.Random(1), World(Pace(batch_groups=1, staleness_limit=1), 2)
    weights = WORK | TROUBLE
    for move in rng.choices(list(weights), list(weights.values()), k=4 * MOVES):
        move(world, rng)
    attempts = Counter(attempt for _, attempt in world.ran)
    assert attempts[1] > 10 and attempts[2] > 2
    assert any(member.usable for group in world.closed for member in group.members if group.purpose == "train")
    assert world.version >= 1
