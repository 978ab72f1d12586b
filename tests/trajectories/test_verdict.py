"""Which sessions are usable, which are faults of the infrastructure, and with what reason."""

from __future__ import annotations

import struct

import msgspec
import pytest
from session_stories import call, completed, delivery, ending, failed, fold, opened, session, started

from polar.trajectories import Story, assemble
from polar.trajectories.assembly import unusable
from schemas.sessions import CallCompleted, Sampling

ONE = call(1, [1], [2])
BROKEN_LOGPROB: CallCompleted = msgspec.structs.replace(completed(2, [3]), logprobs=struct.pack("<f", -9999.0))


def verdict(*records, builder="prefix_merging", end=None):
    return assemble(fold([opened(builder=builder), *records, *(ending() if end is None else end)])).verdict


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (verdict(), "no model call"),
        (verdict(*ONE, end=ending(outcome="infrastructure")), "infrastructure"),
        (verdict(*ONE, end=ending(reward=None, error="exit 127")), "evaluator command: exit 127"),
        (verdict(*ONE, end=ending(reward=None)), "gave no reward"),
        (verdict(*ONE, end=[ending()[0], ending()[2]]), "never scored"),
        (verdict(*ONE, started(2, [3])), "call 2 was lost"),
        (verdict(*ONE, started(2, [3]), failed(2)), "call 2 failed: engine_error"),
        (verdict(*ONE, started(2, [3]), completed(2, [4])), "call 2: whether the harness received it"),
        (verdict(*ONE, started(2, [9]), BROKEN_LOGPROB, delivery(2)), "call 2: token 0 has log-prob -9999"),
    ],
)
def test_faults_of_the_infrastructure_are_not_trained(given, reason):
    assert (given.usable, given.infrastructure, given.traces) == (False, True, 0)
    assert reason in given.reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (verdict(*ONE, end=ending(outcome="cancelled")), "cancelled"),
        (verdict(*call(1, [1], [2], sampling=Sampling(top_p=0.9))), "reshapes"),
        (verdict(*call(1, [1], [2], sampling=Sampling(temperature=0.0))), "reshapes"),
        (verdict(*ONE, builder="linear"), "no builder is named 'linear'"),
    ],
)
def test_what_cannot_be_trained_is_not_run_again(given, reason):
    assert (given.usable, given.infrastructure, given.traces) == (False, False, 0)
    assert reason in given.reason


def test_a_fault_that_the_harness_recovered_from_is_none():
    for fault in ([started(1, [1])], [started(1, [1]), failed(1)], [started(1, [1]), completed(1, [9])]):
        given = verdict(*fault, *call(2, [1], [2]))
        assert given.usable and given.traces == 1, fault


def test_a_fault_after_which_nothing_arrived_is_not_recovered():
    given = verdict(*ONE, started(2, [3]), failed(2), started(3, [3]), completed(3, [4]), delivery(3, False))
    assert given.infrastructure and "call 2 failed" in given.reason


def test_failures_of_the_agent_are_scored():
    timed_out = verdict(
        *ONE, started(2, [3]), failed(2, infrastructure=False), end=ending(outcome="agent_timeout", reward=0.0)
    )
    assert timed_out.usable and timed_out.reward == 0.0
    nothing_arrived = verdict(started(1, [1]), completed(1, [2]), delivery(1, False))
    assert nothing_arrived.usable and nothing_arrived.traces == 0


def test_a_title_call_is_not_trained_and_may_reshape():
    given = verdict(*ONE, *call(2, [5], [6], auxiliary="title", sampling=Sampling(temperature=0.0)))
    assert given.usable and given.traces == 1


def test_the_verdict_names_session_attempt_group_and_reward():
    given = assemble(fold(session("s", "group", reward=0.25, attempt=2))).verdict
    assert (given.session_id, given.attempt, given.group_id, given.reward) == ("s", 2, "group", 0.25)


def test_a_story_that_is_not_closed_has_no_verdict_yet():
    with pytest.raises(ValueError, match="not closed"):
        assemble(fold([opened(), *ONE]))
    given_up = unusable(fold([opened(), *ONE]), "too large", infrastructure=False).verdict
    assert not given_up.usable and given_up.reason == "too large"
    with pytest.raises(ValueError, match="never opened"):
        unusable(Story("s"), "too large", infrastructure=False)
