"""The assembler's state machine: crashes, redelivery, rebalances and lost nodes do not change what comes out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from session_stories import call, completed, delivery, ending, opened, same, session, started

from polar.trajectories.fates import FOLLOWED, Fates
from polar.trajectories.open_sessions import OpenSessions
from schemas.scheduling import NodeLost, NodeRegistered, Run, SessionAssembled, SessionFinished

GRACE_S = 5.0


def node(incarnation="i1"):
    slots = {"init_slots": 1, "ready_slots": 1, "run_slots": 1, "postrun_slots": 1}
    return NodeRegistered(node_id="node-1", incarnation=incarnation, **slots)


def run(session_id, attempt=0, incarnation="i1"):
    return Run(node_id="node-1", incarnation=incarnation, session_id=session_id, attempt=attempt)


def fates(*records) -> Fates:
    known = Fates()
    for record in records:
        known.add(record)
    return known


@st.composite
def logs(draw):
    """One partition: whole sessions, some with two attempts, some not closed yet, interleaved."""
    stories = []
    for n in range(draw(st.integers(1, 4))):
        name = f"s{n}"
        first = session(name, calls=draw(st.integers(0, 2)))
        cut = draw(st.integers(1, len(first)))
        match draw(st.sampled_from(["whole", "retried", "open"])):
            case "whole":
                stories.append(first)
            case "retried":
                stories.append(first[:cut] + session(name, calls=2, attempt=1))
            case "open":
                stories.append(first[: min(cut, len(first) - 1)])
    order = draw(st.permutations([i for i, story in enumerate(stories) for _ in story]))
    following = [iter(story) for story in stories]
    return [next(following[i]) for i in order]


def read(log, known, start, stop, at_once):
    """What a process writes that reads ``log[start:stop]``, ``at_once`` records a poll; and what it commits."""
    sessions, written, committed = OpenSessions(known, GRACE_S), [], start
    for begin in range(start, stop, at_once):
        for offset in range(begin, min(stop, begin + at_once)):
            sessions.add(0, offset, log[offset], now_s=0.0)
        if ready := sessions.ready(now_s=0.0):
            committed = sessions.positions(ready).get(0, start)
            sessions.settle(ready)
            written += ready
    return written, committed


def by_attempt(written):
    table = {}
    for assembly in written:
        key = (assembly.verdict.session_id, assembly.verdict.attempt)
        assert same(table.setdefault(key, assembly), assembly)
    return table


@given(logs(), st.data())
def test_killed_anywhere_and_started_again_it_writes_the_same(log, data):
    calm, _ = read(log, Fates(), 0, len(log), 1)
    written, position = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        stop = data.draw(st.integers(position, len(log)))
        before, position = read(log, Fates(), position, stop, data.draw(st.integers(1, 5)))
        written += before
    rest, _ = read(log, Fates(), position, len(log), data.draw(st.integers(1, 5)))
    # Where both attempts of a session arrive in one poll, the lower one is void before anyone looked at it.
    ours, theirs = by_attempt(written + rest), by_attempt(calm)
    highest = {key for key in theirs if (key[0], key[1] + 1) not in theirs}
    assert highest <= ours.keys() <= theirs.keys()
    assert all(same(ours[key], theirs[key]) for key in ours)


@given(logs(), st.data())
def test_what_the_scheduler_log_says_is_assembled_is_not_written_again(log, data):
    known, stop = Fates(), data.draw(st.integers(0, len(log)))
    before, _ = read(log, known, 0, stop, 1)
    after, _ = read(log, known, 0, len(log), 1)
    keys = [(a.verdict.session_id, a.verdict.attempt) for a in before + after]
    assert len(keys) == len(set(keys))


def test_the_position_waits_for_the_oldest_open_session():
    sessions = OpenSessions(Fates(), GRACE_S)
    log = [opened("slow"), *session("quick", calls=1)]
    for offset, record in enumerate(log):
        sessions.add(0, 10 + offset, record, now_s=0.0)
    ready = sessions.ready(0.0)
    assert sessions.positions() == {0: 10}
    assert [a.verdict.session_id for a in ready] == ["quick"] and sessions.positions(ready) == {0: 10}
    sessions.settle(ready)
    for offset, record in enumerate([*call(1, [1], [2], "slow"), *ending("slow")]):
        sessions.add(0, 30 + offset, record, now_s=0.0)
    ready = sessions.ready(0.0)
    assert sessions.positions() == {0: 10} and sessions.positions(ready) == {0: 36}


def test_a_call_without_an_end_is_waited_for_until_the_grace_period_is_over():
    log = [opened(), started(1, [1]), completed(1, [2]), *call(2, [1, 2, 3], [4]), *ending()]
    sessions = OpenSessions(Fates(), GRACE_S)
    for offset, record in enumerate(log):
        sessions.add(0, offset, record, now_s=100.0)
    assert sessions.ready(100.0) == [] and sessions.ready(100.0 + GRACE_S - 0.1) == []
    [assembly] = sessions.ready(100.0 + GRACE_S)
    assert assembly.verdict.usable and assembly.traces[0].trained_tokens == 2


def test_a_late_delivery_ends_the_wait():
    log = [opened(), started(1, [1]), completed(1, [2]), *ending(), delivery(1)]
    sessions = OpenSessions(Fates(), GRACE_S)
    for offset, record in enumerate(log[:-1]):
        sessions.add(0, offset, record, now_s=0.0)
    assert sessions.ready(0.0) == []
    sessions.add(0, len(log), log[-1], now_s=1.0)
    assert len(sessions.ready(1.0)) == 1


def test_a_session_whose_node_was_lost_is_let_go():
    for end in (NodeLost(node_id="node-1", incarnation="i1", reason="lease"), node("i2")):
        known = fates(node(), run("s"))
        sessions = OpenSessions(known, GRACE_S)
        sessions.add(0, 0, opened(), now_s=0.0)
        assert sessions.ready(0.0) == [] and sessions.positions() == {0: 0}
        known.add(end)
        assert sessions.ready(0.0) == [] and len(sessions) == 0 and sessions.positions() == {0: 1}


def test_a_session_that_was_closed_before_its_node_was_lost_keeps_its_verdict():
    known = fates(node(), run("s"))
    sessions = OpenSessions(known, GRACE_S)
    for offset, record in enumerate(session("s", calls=1)):
        sessions.add(0, offset, record, now_s=0.0)
    known.add(node("i2"))
    assert [a.verdict.usable for a in sessions.ready(0.0)] == [True]


def test_a_finished_session_keeps_its_verdict_when_its_node_comes_back_before_its_end_is_read():
    finished = SessionFinished(node_id="node-1", incarnation="i1", session_id="s", attempt=0, outcome="completed")
    for end in (NodeLost(node_id="node-1", incarnation="i1", reason="lease"), node("i2")):
        sessions = OpenSessions(fates(node(), run("s"), finished, end), GRACE_S)
        *before, closed = session("s", calls=1)
        for offset, record in enumerate(before):
            sessions.add(0, offset, record, now_s=0.0)
        assert sessions.ready(0.0) == [] and len(sessions) == 1
        sessions.add(0, len(before), closed, now_s=1.0)
        assert [a.verdict.usable for a in sessions.ready(1.0)] == [True]


def test_a_session_that_grows_too_large_is_given_up_with_a_reason():
    sessions = OpenSessions(Fates(), GRACE_S, max_session_bytes=40)
    for offset, record in enumerate([opened(), *call(1, range(20), [1])]):
        sessions.add(0, offset, record, now_s=0.0)
    [assembly] = sessions.ready(0.0)
    assert not assembly.verdict.usable and "more than 40 bytes" in assembly.verdict.reason


def test_a_limit_on_verdicts_delays_the_rest():
    sessions = OpenSessions(Fates(), GRACE_S)
    log = [record for n in range(5) for record in session(f"s{n}", calls=1)]
    for offset, record in enumerate(log):
        sessions.add(0, offset, record, now_s=0.0)
    names = []
    while ready := sessions.ready(0.0, limit=2):
        sessions.settle(ready)
        names.append([a.verdict.session_id for a in ready])
    assert names == [["s0", "s1"], ["s2", "s3"], ["s4"]]


def test_partitions_that_go_are_forgotten():
    sessions = OpenSessions(Fates(), GRACE_S)
    sessions.add(0, 0, opened("a"), now_s=0.0)
    sessions.add(1, 7, opened("b"), now_s=0.0)
    sessions.drop({0})
    assert sessions.positions() == {1: 7} and len(sessions) == 1


def test_fates_names_the_record_types_that_it_follows():
    followed = (Run, NodeRegistered, NodeLost, SessionFinished, SessionAssembled)
    assert {kind.__struct_config__.tag for kind in followed} == FOLLOWED
