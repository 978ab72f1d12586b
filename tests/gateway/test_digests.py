"""What makes two histories the same, although a program has rewritten them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.digests import EXACT_BYTES, conversation

ARGUMENTS = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), st.integers(), st.none()), max_size=3)


def last(*messages: dict[str, Any], tools: list[Any] | None = None, **options: Any) -> bytes:
    return conversation(list(messages), tools or [], options).chain[-1]


def called(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | more


@given(st.text(), ARGUMENTS)
def test_what_programs_rewrite_is_the_same(text: str, arguments: dict[str, Any]) -> None:
    plain = {"role": "user", "content": text}
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    assert last(plain) == last({"role": "user", "content": [block]})
    tight, loose = json.dumps(arguments, separators=(",", ":")), json.dumps(arguments, indent=2, sort_keys=True)
    sent = called(loose, content="", reasoning_content="because")
    sent["tool_calls"][0]["id"] = "another"
    assert last(called(tight)) == last(sent)


@pytest.mark.parametrize("broken", ["{", "[1]", "nonsense", '"text"', "null"])
def test_arguments_that_are_no_object_match_what_programs_send_back_for_them(broken: str) -> None:
    assert last(called(broken)) == last(called("{}"))


@given(st.text(), st.text())
def test_other_texts_are_others(one: str, other: str) -> None:
    same = last({"role": "user", "content": one}) == last({"role": "user", "content": other})
    assert same is (one == other or not (one.strip() or other.strip()))


def test_role_tools_and_what_shapes_the_template_count() -> None:
    plain = {"role": "user", "content": "a"}
    other = [
        last({"role": "system", "content": "a"}),
        last(plain, tools=[{"type": "function"}]),
        last(plain, chat_template_kwargs={"enable_thinking": False}),
        last(plain, tool_choice="none"),
        last(plain, plain),
    ]
    assert len({last(plain), *other}) == len(other) + 1
    assert last(plain, temperature=0.1, tool_choice="auto") == last(plain)


def test_an_image_is_part_of_the_history() -> None:
    images = [{"type": "image_url", "image_url": {"url": f"data:{name}"}} for name in "ab"]
    assert last({"role": "user", "content": images[:1]}) != last({"role": "user", "content": images[1:]})


@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_leading_messages_that_are_equal_are_counted(one: list[str], other: list[str]) -> None:
    talks = [conversation([{"role": "user", "content": text} for text in texts], [], {}) for texts in (one, other)]
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert talks[0].equal_messages(talks[1].exact) == same
    assert len(talks[0].exact) == EXACT_BYTES * len(one)
