"""What the demo reports."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.demo.result import Evaluation, evaluation, wilson


def member(reward, usable=True):
    return {"session_id": "s", "attempt": 1, "usable": usable, "reward": reward, "traces": 1, "reason": ""}


def test_sessions_without_a_fair_score_count_for_nothing():
    members = [
        member(1.0),
        member(1.0),
        member(0.5),
        member(0.0),
        member(None, usable=False),
        member(1.0, usable=False),
    ]
    found = evaluation(members, version=3, seconds=1.0)
    assert (found.sessions, found.passed, found.unscored) == (4, 2, 2)
    assert found.pass_at_1 == 0.5


def test_without_a_scored_session_there_is_no_share():
    found = evaluation([], version=0, seconds=1.0)
    assert math.isnan(found.pass_at_1) and found.interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    # Newcombe 1998, table I: Wilson's score interval without continuity correction.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_published_intervals(passed, n, low, high):
    assert wilson(passed, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share(counts):
    passed, n = counts
    low, high = Evaluation(version=0, sessions=n, passed=passed, unscored=0, seconds=0.0).interval
    assert 0.0 <= low <= passed / n <= high <= 1.0
