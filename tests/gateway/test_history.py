"""What is written of a call, together with its base, is the whole call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.attempts import Attempts
from gateway_app.history import AttemptHistory, Histories, PastCall, common_prefix
from schemas.scheduling import SessionExited

IDS = st.lists(st.integers(0, 2), max_size=12)
MESSAGES = st.lists(st.sampled_from([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]), max_size=5)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


@given(st.lists(st.tuples(MESSAGES, IDS, IDS), max_size=5), MESSAGES, IDS)
def test_base_and_rest_make_the_whole(past: list, messages: list, ids: list[int]) -> None:
    history = AttemptHistory()
    for index, (old_messages, prompt, response) in enumerate(past):
        call = PastCall(str(index), old_messages, [], array(prompt))
        history.add(call)
        call.extend({"role": "assistant", "content": str(index)}, response)
    base = history.base_of(messages, array(ids))
    if base is None:
        assert all(common_prefix(array([*prompt, *response]), array(ids)) == 0 for _, prompt, response in past)
        return
    _, prompt, response = past[int(base.call.call_id)]
    assert [*prompt, *response][: base.kept_ids] == ids[: base.kept_ids]
    assert base.call.messages[: base.kept_messages] == messages[: base.kept_messages]
    assert base.kept_ids == max(common_prefix(array([*p, *r]), array(ids)) for _, p, r in past)


def test_call_numbers_go_on_for_each_attempt() -> None:
    histories = Histories()
    histories.resume({("s", 1): 4})
    assert [histories.of("s", 1).take_number() for _ in range(2)] == [4, 5]
    assert histories.of("s", 2).take_number() == 0
    for index in range(2000):
        histories.of(f"other-{index}", 0)
    assert histories.of("s", 1).take_number() == 6


def test_an_attempt_that_ends_is_forgotten_with_those_before_it() -> None:
    histories = Histories()
    attempts = Attempts(on_end=histories.drop)
    histories.resume({("s", 0): 4, ("s", 2): 5, ("t", 0): 6})
    kept, dropped = histories.of("t", 0), histories.of("s", 1)
    attempts.evolve(SessionExited(session_id="s", attempt=1, node_id="n", incarnation="i"))
    assert histories.of("t", 0) is kept and histories.of("s", 1) is not dropped
    assert [histories.of("s", attempt).take_number() for attempt in range(3)] == [0, 0, 5]


def test_numbers_are_kept_of_so_many_attempts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_app.history.NUMBERS", 2)
    histories = Histories()
    histories.resume({("a", 0): 1, ("b", 0): 2, ("c", 0): 3})
    assert [histories.of(session, 0).take_number() for session in "abc"] == [0, 2, 3]
