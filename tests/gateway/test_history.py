"""What is written of a call, together with its base, is the whole call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.attempts import Attempts
from gateway_app.dialects.dialect import Reply
from gateway_app.digests import conversation
from gateway_app.history import AttemptHistory, Histories, Turn, common_prefix
from schemas.scheduling import SessionExited

IDS = st.lists(st.integers(0, 2), max_size=12)
MESSAGES = st.lists(st.sampled_from([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]), max_size=5)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def serve(history: AttemptHistory, name: str, messages: list, prompt: list[int], response: list[int]) -> Turn:
    """A call of the attempt, as the gateway keeps it."""
    talk = conversation(messages, [], {})
    turn = history.add(name, talk, array(prompt), history.base(talk, array(prompt), history.match(talk)))
    history.extend(turn, talk, Reply(content=name), response, ended_by_token=True)
    return turn


@given(st.lists(st.tuples(MESSAGES, IDS, IDS), max_size=5), MESSAGES, IDS)
def test_base_and_rest_make_the_whole(past: list, messages: list, ids: list[int]) -> None:
    history = AttemptHistory()
    turns = [serve(history, str(index), *call) for index, call in enumerate(past)]
    for turn, (_, prompt, response) in zip(turns, past, strict=True):
        assert turn.ids().tolist() == [*prompt, *response] and turn.length == len(prompt) + len(response)
    base = history.base(conversation(messages, [], {}), array(ids), None)
    if base is None:
        assert all(common_prefix(array([*prompt, *response]), array(ids)) == 0 for _, prompt, response in past)
        return
    old, prompt, response = past[int(base.turn.call_id)]
    assert [*prompt, *response][: base.kept_ids] == ids[: base.kept_ids]
    whole = [*old, Reply(content=base.turn.call_id).message()]
    assert whole[: base.kept_messages] == messages[: base.kept_messages]
    assert base.kept_ids == max(common_prefix(array([*p, *r]), array(ids)) for _, p, r in past)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8))
def test_a_chain_of_turns_takes_the_memory_of_its_tokens_once(pieces: list) -> None:
    history, prompt, messages = AttemptHistory(), [7], [{"role": "user", "content": "a"}]
    held = 0
    for index, (new, response) in enumerate(pieces):
        prompt = [*prompt, *new]
        turn = serve(history, str(index), messages, prompt, response)
        held += len(turn.tail)
        messages = [*messages, Reply(content=str(index)).message(), {"role": "user", "content": "a"}]
        prompt = [*prompt, *response]
    assert turn.ids().tolist() == prompt and held == len(prompt) <= history.size


def test_the_deepest_reply_that_was_served_is_matched() -> None:
    history, messages = AttemptHistory(), [{"role": "user", "content": "a"}]
    first = serve(history, "one", messages, [1], [2, 9])
    longer = [*messages, Reply(content="one").message(), {"role": "user", "content": "b"}]
    second = serve(history, "two", longer, [1, 2, 9, 3], [4, 9])
    whole = [*longer, Reply(content="two").message(), {"role": "tool", "content": "c"}]
    deep, shallow = history.match(conversation(whole, [], {})), history.match(conversation(whole[:3], [], {}))
    assert deep is not None and (deep.turn, deep.messages) == (second, 4)
    assert shallow is not None and (shallow.turn, shallow.messages) == (first, 2)
    assert history.match(conversation(whole, [{"type": "function"}], {})) is None
    assert history.match(conversation([{"role": "user", "content": "b"}, *whole[1:]], [], {})) is None


def test_a_call_without_a_reply_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    history, talk = AttemptHistory(), conversation([{"role": "user", "content": "a"}], [], {})
    turn = history.add("x", talk, array([1, 2]), None)
    history.discard(turn)
    assert history.base(talk, array([1, 2]), None) is None and history.size == 0


def test_what_is_kept_of_an_attempt_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_app.history.MAX_ATTEMPT_IDS", 10)
    history = AttemptHistory()
    for index in range(5):
        serve(history, str(index), [{"role": "user", "content": str(index)}], [index] * 3, [index])
    assert history.size <= 10 and not history.complete


def test_call_numbers_go_on_for_each_attempt() -> None:
    histories = Histories()
    histories.resume({("s", 1): 4})
    assert [histories.of("s", 1).take_number() for _ in range(2)] == [4, 5]
    assert histories.of("s", 2).take_number() == 0
    for index in range(5000):
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
