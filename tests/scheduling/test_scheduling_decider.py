"""Single rules of the scheduler's decider, and what it costs."""

from __future__ import annotations

import gc
from itertools import count

import pytest
from world import World, assembled, published, registered, task

from polar.scheduling.decider import Pace, decide, room
from polar.scheduling.leases import Leases
from polar.scheduling.state import State, evolve, session_id
from schemas.batches import GroupExcluded
from schemas.scheduling import (
    Cancel,
    Drain,
    GroupSettled,
    NodeLost,
    Prewarm,
    Run,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
)
from schemas.tasks import TaskCancelled, TaskSpec, TaskSubmitted
from schemas.traces import GroupClosed

PACE = Pace(batch_groups=2, staleness_limit=1)


def fold(*records) -> State:
    state = State()
    for record in records:
        evolve(state, record)
    return state


def on(prewarm: Prewarm, kind: type, **fields):
    """A record about the attempt that ``prewarm`` began."""
    return kind(
        node_id=prewarm.node_id,
        incarnation=prewarm.incarnation,
        session_id=prewarm.session_id,
        attempt=prewarm.attempt,
        **fields,
    )


def step(state: State) -> list:
    """Decides, and folds the decision as it will be read back."""
    decision = decide(state, PACE)
    for record in decision:
        if not isinstance(record, GroupClosed):
            evolve(state, record)
    return decision


def prewarmed(spec: TaskSpec, **slots) -> tuple[State, list[Prewarm]]:
    state = fold(registered("a", "a1", **slots), TaskSubmitted(task=spec))
    return state, step(state)


def test_a_session_goes_through_its_stages_and_its_group_is_closed_with_the_verdict():
    state, [prewarm] = prewarmed(task("t", 1))
    assert (prewarm.session_id, prewarm.attempt, prewarm.task.task_id) == (session_id("t", 0), 1, "t")
    assert step(state) == []
    evolve(state, on(prewarm, SessionReady))
    [run] = step(state)
    assert isinstance(run, Run)
    for kind in (SessionRunning, SessionExited):
        evolve(state, on(prewarm, kind))
    evolve(state, on(prewarm, SessionFinished, outcome="completed"))
    assert step(state) == []
    evolve(state, assembled(prewarm.session_id, 1, "t"))
    closed, settled = step(state)
    assert isinstance(settled, GroupSettled)
    [member] = closed.members
    assert (member.usable, member.reward, member.attempt, member.traces) == (True, 1.0, 1, 1)
    assert step(state) == []


@pytest.mark.parametrize("verdict_first", [True, False])
def test_the_next_attempt_waits_for_both_the_verdict_and_the_node(verdict_first):
    state, [prewarm] = prewarmed(task("t", 1))
    for kind in (SessionReady, SessionRunning, SessionExited):
        evolve(state, on(prewarm, kind))
    last_words = [
        on(prewarm, SessionFinished, outcome="infrastructure"),
        assembled(prewarm.session_id, 1, "t", "infrastructure"),
    ]
    first, second = reversed(last_words) if verdict_first else last_words
    evolve(state, first)
    assert step(state) == []
    evolve(state, second)
    [again] = step(state)
    assert again.attempt == 2


def test_attempts_end_at_the_task_s_limit_and_the_group_is_closed_as_unusable():
    state, [prewarm] = prewarmed(task("t", 1, max_attempts=2))
    evolve(state, on(prewarm, SessionFinished, outcome="infrastructure", reason="disk full"))
    [again] = step(state)
    assert again.attempt == 2
    evolve(state, on(again, SessionFinished, outcome="infrastructure", reason="disk full"))
    closed, _ = step(state)
    [member] = closed.members
    assert not member.usable
    assert member.reason == "disk full (attempt 2 was the last)"


def test_a_lost_node_s_sessions_run_again_elsewhere_but_not_one_that_is_already_assembled():
    state = fold(registered("a", "a1"), registered("b", "b1", run=8), TaskSubmitted(task=task("t", 3)))
    prewarms = step(state)
    at_a = [prewarm for prewarm in prewarms if prewarm.node_id == "a"]
    assert len(at_a) == 1
    [first] = at_a
    for kind in (SessionReady, SessionRunning, SessionExited):
        evolve(state, on(first, kind))
    evolve(state, assembled(first.session_id, 1, "t"))
    evolve(state, NodeLost(node_id="a", incarnation="a1", reason="silent"))
    assert step(state) == []
    evolve(state, NodeLost(node_id="b", incarnation="b1", reason="silent"))
    evolve(state, registered("c", "c1"))
    again = step(state)
    assert {(p.session_id, p.attempt, p.node_id) for p in again} == {
        (p.session_id, 2, "c") for p in prewarms if p.node_id == "b"
    }


def test_a_new_incarnation_voids_the_old_one_s_sessions_and_reports():
    state, [prewarm] = prewarmed(task("t", 1))
    evolve(state, registered("a", "a2"))
    [again] = step(state)
    assert (again.incarnation, again.attempt) == ("a2", 2)
    evolve(state, on(prewarm, SessionReady))
    evolve(state, registered("a", "a1"))
    assert step(state) == []


def test_the_verdict_on_a_former_attempt_says_nothing_of_the_current_one():
    state, [prewarm] = prewarmed(task("t", 1))
    for kind in (SessionReady, SessionRunning, SessionExited):
        evolve(state, on(prewarm, kind))
    evolve(state, registered("a", "a2"))
    [again] = step(state)
    evolve(state, assembled(prewarm.session_id, 1, "t"))
    for kind in (SessionReady, SessionRunning, SessionExited):
        evolve(state, on(again, kind))
    evolve(state, on(again, SessionFinished, outcome="completed"))
    assert step(state) == []
    evolve(state, assembled(prewarm.session_id, 2, "t", "unusable"))
    closed, _ = step(state)
    assert [(member.attempt, member.usable, member.reason) for member in closed.members] == [(2, False, "unusable")]


def test_a_prewarm_that_was_decided_before_the_verdict_came_supersedes_it():
    state, [prewarm] = prewarmed(task("t", 1))
    for kind in (SessionReady, SessionRunning, SessionExited):
        evolve(state, on(prewarm, kind))
    evolve(state, registered("a", "a2"))
    [again] = decide(state, PACE)
    evolve(state, assembled(prewarm.session_id, 1, "t"))
    evolve(state, again)
    assert step(state) == []
    evolve(state, on(again, SessionReady))
    assert [type(record) for record in step(state)] == [Run]


def test_a_failed_session_avoids_the_node_that_failed_it():
    state = fold(registered("a", "a1"), registered("b", "b1"), TaskSubmitted(task=task("t", 1)))
    [prewarm] = step(state)
    evolve(state, on(prewarm, SessionFinished, outcome="infrastructure"))
    [again] = step(state)
    assert {prewarm.node_id, again.node_id} == {"a", "b"}


def test_eval_goes_first_then_open_groups_then_groups_as_they_were_submitted():
    first, second, third = task("z-first", 3), task("a-second", 2), task("m-third", 2, purpose="eval")
    state = fold(registered("a", "a1"), TaskSubmitted(task=first))
    step(state)
    evolve(state, TaskSubmitted(task=second))
    evolve(state, TaskSubmitted(task=third))
    evolve(state, registered("b", "b1", ready=4))
    assert [record.task.task_id for record in step(state)] == ["m-third", "m-third", "z-first", "a-second"]


def test_whole_train_groups_are_opened_within_the_limit_and_eval_ones_without():
    state = fold(registered("a", "a1", ready=1000))
    for number in range(20):
        evolve(state, TaskSubmitted(task=task(f"t{number:02}", 2)))
        evolve(state, TaskSubmitted(task=task(f"e{number:02}", 1, purpose="eval")))
    opened = {record.task.task_id for record in step(state)}
    assert sorted(group for group in opened if group.startswith("t")) == ["t00", "t01", "t02", "t03"]
    assert sum(group.startswith("e") for group in opened) == 20
    evolve(state, GroupExcluded(policy="policy", group_id="t01", reason="no_variance"))
    evolve(state, GroupExcluded(policy="policy", group_id="t01", reason="no_variance"))
    assert {record.task.task_id for record in step(state)} == {"t04"}
    evolve(state, published(1))
    assert room(state, "policy", PACE) == 2
    assert {record.task.task_id for record in step(state)} == {"t05", "t06"}
    evolve(state, TaskSubmitted(task=task("other", 1, policy="other")))
    assert {record.task.task_id for record in step(state)} == {"other"}


def test_cancelling_ends_what_runs_never_starts_what_waits_and_closes_the_group_untrained():
    state = fold(registered("a", "a1"), TaskSubmitted(task=task("t", 3)), TaskSubmitted(task=task("never", 1)))
    prewarms = step(state)
    evolve(state, on(prewarms[0], SessionReady))
    evolve(state, TaskCancelled(task_id="t", reason="enough"))
    evolve(state, TaskCancelled(task_id="never"))
    decision = step(state)
    assert [record.group_id for record in decision if isinstance(record, GroupClosed)] == ["never"]
    cancels = [record for record in decision if isinstance(record, Cancel)]
    assert [record.session_id for record in cancels] == [record.session_id for record in prewarms]
    assert step(state) == []
    for prewarm in prewarms:
        evolve(state, on(prewarm, SessionFinished, outcome="cancelled"))
    [closed] = [record for record in step(state) if isinstance(record, GroupClosed)]
    assert [(member.usable, member.reason) for member in closed.members] == [(False, "enough")] * 3
    assert [member.attempt for member in closed.members] == [1, 1, 0]


def test_a_cancelled_group_that_was_never_opened_gives_no_room_when_it_is_excluded():
    state = fold(TaskSubmitted(task=task("t", 1)), TaskCancelled(task_id="t"))
    step(state)
    evolve(state, GroupExcluded(policy="policy", group_id="t", reason="no_usable_session"))
    assert room(state, "policy", PACE) == 4


def test_cancelling_a_ready_session_frees_its_slot_once():
    state, prewarms = prewarmed(task("t", 2))
    for prewarm in prewarms:
        evolve(state, on(prewarm, SessionReady))
    evolve(state, TaskCancelled(task_id="t"))
    step(state)
    for prewarm in prewarms * 2:
        evolve(state, on(prewarm, SessionFinished, outcome="cancelled"))
    evolve(state, TaskSubmitted(task=task("u", 5)))
    assert sum(isinstance(record, Prewarm) for record in step(state)) == 2


def test_a_draining_node_gets_no_further_sessions_but_runs_those_it_has():
    state, [prewarm] = prewarmed(task("t", 1))
    evolve(state, Drain(node_id="a", incarnation="a1"))
    evolve(state, TaskSubmitted(task=task("u", 1)))
    assert step(state) == []
    evolve(state, on(prewarm, SessionReady))
    assert [type(record) for record in step(state)] == [Run]


def test_a_prewarm_behind_a_drain_is_refused_and_the_session_goes_elsewhere():
    state = fold(registered("a", "a1"), TaskSubmitted(task=task("t", 1)))
    [prewarm] = decide(state, PACE)
    evolve(state, Drain(node_id="a", incarnation="a1"))
    evolve(state, prewarm)
    evolve(state, registered("b", "b1"))
    [again] = step(state)
    assert (again.node_id, again.attempt) == ("b", 2)


def test_a_slow_evaluator_holds_back_runs():
    state, prewarms = prewarmed(task("t", 9), ready=4, run=1)
    for prewarm in prewarms:
        evolve(state, on(prewarm, SessionReady))
    for _ in range(2):
        [run] = [record for record in step(state) if isinstance(record, Run)]
        evolve(state, on(run, SessionRunning))
        evolve(state, on(run, SessionExited))
    assert not [record for record in step(state) if isinstance(record, Run)]
    evolve(state, on(run, SessionFinished, outcome="completed"))
    assert len([record for record in step(state) if isinstance(record, Run)]) == 1


def test_leases_end_after_silence_and_only_for_nodes_that_are_watched():
    leases = Leases(15.0)
    leases.watch([("a", "a1"), ("b", "b1")], now=100.0)
    leases.heard(("a", "a1"), now=110.0)
    leases.heard(("c", "c1"), now=110.0)
    assert leases.expired(now=115.0) == []
    assert leases.expired(now=116.0) == [("b", "b1")]
    leases.watch([("a", "a1"), ("c", "c1")], now=120.0)
    assert leases.expired(now=126.0) == [("a", "a1")]


def test_ten_thousand_finished_sessions_leave_only_ids_behind():
    world = World(Pace(batch_groups=4, staleness_limit=1), nodes=0)
    world.start_process("node")
    for number in count():
        if number == 1250:
            break
        world.submit(8, "eval", 1)
    world.settle()
    assert sum(world.ran.values()) == 10_000
    state = State()
    for record in world.tasks + world.scheduler:
        evolve(state, record)
    assert len(state.settled) == 1250
    gc.collect()
    reached, seen = [state], set()
    while reached:
        one = reached.pop()
        if id(one) not in seen:
            seen.add(id(one))
            reached += [o for o in gc.get_referents(one) if not isinstance(o, type) and gc.is_tracked(o)]
    assert len(seen) < 1000, "objects of settled groups are kept"
