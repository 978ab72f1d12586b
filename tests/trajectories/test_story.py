"""The fold of a session's events: order and duplicates do not matter, a higher attempt voids lower ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_stories import call, completed, delivery, ending, failed, fold, opened, session, started

from polar.trajectories import BrokenCall, Story, assemble, whole_calls
from polar.trajectories.calls import MAX_WHOLE_IDS
from schemas.sessions import CallFailed, SessionClosed

WHOLE = session("s", calls=3)
WITH_A_FAULT = [opened(), started(1, [1, 2]), failed(1), *call(2, [1, 2], [3]), *ending()]
CONTRADICTING = [*WHOLE, delivery(2, False), SessionClosed(session_id="s", attempt=0, outcome="agent_timeout")]


@given(st.sampled_from([WHOLE, WITH_A_FAULT, CONTRADICTING]), st.data())
def test_order_and_duplicates_do_not_matter(records, data):
    shuffled = data.draw(st.permutations(records + data.draw(st.lists(st.sampled_from(records), max_size=6))))
    expected, story = fold(records), fold(shuffled)
    assert story == expected
    assert msgspec.json.encode(assemble(story)) == msgspec.json.encode(assemble(expected))


def test_any_event_of_a_higher_attempt_voids_the_lower_one():
    again = opened(attempt=1)
    story = fold([*session("s", attempt=0), again])
    assert (story.attempt, story.calls, story.closed, story.packed_bytes) == (1, {}, None, 0)
    assert fold([again, *session("s", attempt=0)]) == story


@pytest.mark.parametrize("missing", range(len(WHOLE)))
def test_a_session_is_complete_when_nothing_is_missing(missing):
    assert fold(WHOLE).complete
    incomplete = fold(WHOLE[:missing] + WHOLE[missing + 1 :])
    optional = WHOLE[missing].__class__.__name__ in ("HarnessExited", "SessionScored", "CallStarted")
    assert incomplete.complete == optional


def test_a_call_ends_by_failing_or_by_completing_and_its_delivery():
    story = fold([opened(), started(1, [1])])
    assert story.calls["s-0-c1"].lost
    story.add(completed(1, [2]))
    assert not story.calls["s-0-c1"].lost and not story.calls["s-0-c1"].ended
    story.add(delivery(1, False))
    assert story.calls["s-0-c1"].ended


def test_events_of_another_session_are_refused():
    with pytest.raises(ValueError, match="session other"):
        Story("s").add(opened("other"))


def test_a_story_holds_no_messages():
    long = "x" * 2**16
    large = started(1, [1], messages=[{"content": long}], tools=[{"name": long}])
    story = fold([opened(), large, completed(1, [2], message={"content": long}), delivery(1), *ending()])
    assert long.encode() not in msgspec.json.encode(story) and assemble(story).verdict.usable


def test_a_session_whose_whole_calls_are_too_many_ids_is_given_up_before_they_are_made():
    first = 2**20
    calls = call(0, np.zeros(first, np.int32), [1])
    for number in range(1, MAX_WHOLE_IDS // first):
        calls += call(number, [], [1], base=0, kept=first)
    verdict = assemble(fold([opened(), *calls, *ending()])).verdict
    assert (verdict.usable, verdict.infrastructure) == (False, False) and "whole prompts, more than" in verdict.reason


def test_differences_and_wholes_give_the_same_calls():
    first = [started(1, [1, 2, 3]), completed(1, [4, 5])]
    as_difference = started(2, [6], base=1, kept=5)
    as_whole = started(2, [1, 2, 3, 4, 5, 6])
    shortened = started(2, [4, 5, 6], base=1, kept=3)
    for second in (as_difference, as_whole, shortened):
        whole = whole_calls(fold([opened(), *first, second]))[1]
        assert whole.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6]


@given(st.permutations([1, 2, 3, 4]))
def test_bases_may_be_any_call_and_events_arrive_in_any_order(order):
    records = {
        1: started(1, [1, 2]),
        2: started(2, [3], base=1, kept=2),
        3: started(3, [4], base=2, kept=3),
        4: started(4, [9], base=2, kept=1),
    }
    calls = whole_calls(fold([records[n] for n in order]))
    assert [c.prompt_ids.tolist() for c in calls] == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 9]]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([started(2, [3], base=1, kept=2)], "base call s-0-c1 is not in the session's story"),
        ([started(1, [1]), started(2, [3], base=1, kept=2)], "call 2: it keeps 2 of its base, which has 1"),
        ([started(1, [1], base=2, kept=0), started(2, [3], base=1, kept=0)], "form a circle"),
        ([completed(1, [1])], "its start is not"),
    ],
)
def test_a_call_that_cannot_be_made_whole_is_named(records, message):
    with pytest.raises(BrokenCall, match=message):
        whole_calls(fold([opened(), *records]))
    verdict = assemble(fold([opened(), *records, *ending()])).verdict
    assert (verdict.usable, verdict.infrastructure) == (False, True)


def test_what_was_delivered_is_told_or_inferred():
    records = [
        opened(),
        *[started(1, [1]), completed(1, [2])],
        *[started(2, [1, 2, 3]), completed(2, [4]), delivery(2, False)],
        *[started(3, [1, 2, 3, 4, 5]), completed(3, [6])],
    ]
    assert [c.delivered for c in whole_calls(fold(records))] == [True, False, False]


def test_a_failure_and_a_completion_of_one_call_count_as_completed():
    records = [opened(), *call(1, [1], [2]), *ending()]
    records.insert(2, CallFailed(session_id="s", attempt=0, call_id="s-0-c1", reason="x", infrastructure=True))
    assert assemble(fold(records)).verdict.usable
