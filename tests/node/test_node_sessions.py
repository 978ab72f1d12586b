"""The node's state machine: slots are never exceeded, leaked or freed twice, in whatever order things happen."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.node_sessions import NodeSessions

SLOTS = {"init": 2, "ready": 2, "run": 2, "postrun": 1}
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def verbs(actions):
    return [(action.verb, action.key) for action in actions]


def test_one_session_from_prewarm_to_finish():
    node = NodeSessions(SLOTS)
    assert verbs(node.prewarm(A)) == [("prepare", A)]
    assert verbs(node.prepared(A)) == [("announce", A)]
    assert node.counts() == {"init": 0, "ready": 1, "run": 0, "postrun": 0}
    assert verbs(node.run(A)) == [("launch", A)]
    assert node.counts()["ready"] == 0
    assert verbs(node.exited(A, timed_out=True)) == [("score", A)]
    (finish,) = node.scored(A)
    assert (finish.verb, finish.outcome) == ("finish", "agent_timeout")
    node.finished(A)
    assert not any(node.counts().values())


def test_repeated_and_older_commands_change_nothing():
    node = NodeSessions(SLOTS)
    node.prewarm(("a", 2))
    assert node.prewarm(("a", 2)) == node.prewarm(("a", 1)) == []
    assert node.run(("a", 2)) == []  # still in INIT
    node.prepared(("a", 2))
    node.run(("a", 2))
    assert node.run(("a", 2)) == []
    assert node.run(("other", 1)) == node.cancel(("other", 1), "") == []
    node.exited(("a", 2))
    node.scored(("a", 2))
    node.finished(("a", 2))
    assert node.prewarm(("a", 2)) == []
    assert verbs(node.prewarm(("a", 3))) == [("prepare", ("a", 3))]


def test_cancelling_a_ready_session_frees_its_slot_once():
    node = NodeSessions(SLOTS)
    node.prewarm(A)
    node.prepared(A)
    (finish,) = node.cancel(A, "not wanted")
    assert (finish.verb, finish.outcome, finish.reason) == ("finish", "cancelled", "not wanted")
    assert node.cancel(A, "again") == node.run(A) == []
    assert node.counts()["ready"] == 0
    node.finished(A)
    assert node.cancel(A, "again") == []


def test_a_working_stage_is_stopped_and_ends_as_cancelled():
    node = NodeSessions(SLOTS)
    node.prewarm(A)
    node.prepared(A)
    node.run(A)
    assert verbs(node.cancel(A, "why")) == [("stop", A)]
    assert node.counts()["run"] == 1, "the slot is held until the processes are gone"
    (finish,) = node.exited(A)
    assert (finish.outcome, finish.reason) == ("cancelled", "why")
    assert node.counts()["run"] == 0


def test_agents_wait_while_evaluations_pile_up():
    node = NodeSessions({"init": 9, "ready": 9, "run": 1, "postrun": 1})
    keys = [(name, 1) for name in "abcd"]
    for key in keys:
        node.prewarm(key)
        node.prepared(key)
    for key in keys:
        node.run(key)
    node.exited(keys[0])
    node.exited(keys[1])
    assert node.counts() == {"init": 0, "ready": 2, "run": 0, "postrun": 1}
    assert verbs(node.scored(keys[0])) == [("finish", keys[0]), ("score", keys[1]), ("launch", keys[2])]


def test_a_draining_node_takes_no_more():
    node = NodeSessions(SLOTS)
    node.prewarm(A)
    node.drain()
    assert node.prewarm(B) == []
    assert verbs(node.prepared(A)) == [("announce", A)]


SESSIONS = [(f"s{n}", attempt) for n in range(4) for attempt in (1, 2)]
EVENTS = st.lists(st.tuples(st.sampled_from(["prewarm", "run", "cancel", "work"]), st.sampled_from(SESSIONS)))


@settings(max_examples=300)
@given(EVENTS, st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.data())
def test_slots_hold_and_each_admitted_session_finishes_once(events, init, ready, run, postrun, data):
    slots = {"init": init, "ready": ready, "run": run, "postrun": postrun}
    node, pending, admitted, finishes = NodeSessions(slots), {}, set(), []

    def carry_out(actions):
        for action in actions:
            if action.verb == "finish":
                finishes.append(action.key)
            if action.verb in ("prepare", "launch", "score", "finish"):
                assert action.key not in pending, "one thing at a time"
                pending[action.key] = action.verb
        counts = node.counts()
        assert all(0 <= counts[slot] <= slots[slot] for slot in slots)

    def work(key):
        verb = pending.pop(key, None)
        if verb == "prepare":
            carry_out(node.prepared(key, data.draw(st.sampled_from([None, "fault"]))))
        elif verb == "launch":
            carry_out(node.exited(key, timed_out=data.draw(st.booleans())))
        elif verb == "score":
            carry_out(node.scored(key))
        elif verb == "finish":
            node.finished(key)

    for name, key in events:
        if name == "prewarm":
            admitted |= {key} if node.admits(key) else set()
            carry_out(node.prewarm(key))
        elif name == "run":
            carry_out(node.run(key))
        elif name == "cancel":
            carry_out(node.cancel(key, "cancelled"))
        else:
            work(key)
    for _ in range(len(admitted) * 8):
        for key in sorted(admitted):
            carry_out(node.run(key))
            work(key)
    assert sorted(finishes) == sorted(admitted)
    assert not any(node.counts().values())
