"""Who may call: the fold over the scheduler's log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway_app.attempts import Attempts
from gateway_app.stopping import Stop
from schemas.record import Record
from schemas.scheduling import (
    Cancel,
    NodeLost,
    NodeRegistered,
    Run,
    SessionExited,
    SessionFinished,
    SessionRunning,
)

SLOTS = {"init_slots": 1, "ready_slots": 1, "run_slots": 1, "postrun_slots": 1}


def where(session: str = "s", attempt: int = 0, node: str = "n", incarnation: str = "i") -> dict:
    return {"session_id": session, "attempt": attempt, "node_id": node, "incarnation": incarnation}


def folded(*records: Record) -> Attempts:
    attempts = Attempts()
    for record in records:
        attempts.evolve(record)
    return attempts


def test_a_session_that_was_never_heard_of_may_call() -> None:
    assert not folded().ended("s", 0)


def test_an_attempt_ends_with_its_process_or_by_a_cancel() -> None:
    for end in (
        SessionExited(**where()),
        SessionFinished(**where(), outcome="completed"),
        Cancel(**where(), reason=""),
    ):
        attempts = folded(SessionRunning(**where()), end)
        assert attempts.ended("s", 0) and not attempts.ended("s", 1) and not attempts.live()


def test_a_higher_attempt_ends_the_lower() -> None:
    attempts = folded(SessionRunning(**where()), Run(**where(attempt=2, node="m")))
    assert attempts.ended("s", 1) and not attempts.ended("s", 2) and attempts.live() == {"s": 2}


def test_the_sessions_of_a_node_end_with_it() -> None:
    lost = NodeLost(node_id="n", incarnation="i", reason="lease")
    again = NodeRegistered(node_id="n", incarnation="j", **SLOTS)
    for end in (lost, again):
        attempts = folded(
            SessionRunning(**where("a")),
            SessionRunning(**where("b", node="other")),
            SessionRunning(**where("c", incarnation="j")),
            end,
        )
        assert attempts.live() == {"b": 0, "c": 0}


def test_calls_in_flight_are_told() -> None:
    attempts, stop, other = folded(SessionRunning(**where())), Stop(), Stop()
    with attempts.stopping("s", 0, stop), attempts.stopping("t", 0, other):
        attempts.evolve(SessionExited(**where()))
        assert stop.is_set and not other.is_set
    late = Stop()
    with attempts.stopping("s", 0, late):
        assert late.is_set


PLACES = st.builds(where, st.sampled_from("ab"), st.integers(0, 3), st.sampled_from("nm"))
RECORDS = st.one_of(
    PLACES.map(lambda place: Run(**place)),
    PLACES.map(lambda place: SessionRunning(**place)),
    PLACES.map(lambda place: SessionExited(**place)),
    PLACES.map(lambda place: Cancel(**place, reason="")),
)


@given(st.lists(RECORDS))
def test_reading_the_log_again_changes_nothing_and_ends_stay(records: list[Record]) -> None:
    attempts = folded(*records)
    before = attempts.live(), [attempts.ended(s, a) for s in "ab" for a in range(4)]
    for record in records:
        attempts.evolve(record)
    assert (attempts.live(), [attempts.ended(s, a) for s in "ab" for a in range(4)]) == before
    for session, attempt in attempts.live().items():
        assert not attempts.ended(session, attempt)
