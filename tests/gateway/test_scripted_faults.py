"""What a test can make the scripted engine do: faults, tokenisations that drift, templates that rewrite history."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Fault, Plan, ScriptedEngine, Template, Turn, by_last_word, by_turn, in_order
from scripted_engine.parsing import told, whole
from scripted_engine.tokens import VOCABULARY, Decoder, decode, encode

REPLY = Plan(content="one two three four")
COUNT = len(REPLY.sampled)
ASKED = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "logprobs": True, "return_token_ids": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(REPLY).serving() as serving:
        yield serving


async def events(engine: ScriptedEngine, **changes: Any) -> tuple[int, list[Any], bool]:
    """(status, what could be read, whether the answer ended properly)."""
    async with aiohttp.ClientSession() as http:
        try:
            async with http.post(f"{engine.url}/v1/chat/completions", json=ASKED | USAGE | changes) as response:
                lines = []
                try:
                    async for line in response.content:
                        lines.append(line)
                except aiohttp.ClientPayloadError:
                    return response.status, lines, False
                return response.status, lines, True
        except aiohttp.ServerDisconnectedError:
            return 0, [], False


def chunks(lines: list[bytes]) -> list[Any]:
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]


def sampled(lines: list[bytes], field: str = "token_ids") -> list[Any]:
    return [choice.get(field) for chunk in chunks(lines) for choice in chunk["choices"] if "token_ids" in choice]


@pytest.mark.parametrize("after", [1, COUNT - 1])
async def test_cut(engine: ScriptedEngine, after: int) -> None:
    engine.fail_next("chat", Fault(kind="cut", after=after))
    status, lines, ended = await events(engine)
    assert (status, ended, sum(map(len, sampled(lines)))) == (200, False, after)
    assert engine.sampled[0].ids == list(REPLY.sampled[:after])
    assert (await events(engine))[2]


async def test_cut_before_any_byte(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="cut"))
    assert await events(engine) == (0, [], False)


async def test_status(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="status", status=503))
    assert [(await events(engine))[0] for _ in range(2)] == [503, 200]


@pytest.mark.parametrize(("kind", "field"), [("no_ids", "token_ids"), ("no_logprobs", "logprobs")])
async def test_field_that_is_missing(engine: ScriptedEngine, kind: Any, field: str) -> None:
    engine.fail_next("chat", Fault(kind=kind, after=2))
    values = sampled((await events(engine))[1], field)
    assert [at for at, value in enumerate(values) if value is None] == [2]


async def test_wrong_length(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="short_logprobs", after=1))
    values = sampled((await events(engine))[1], "logprobs")
    assert [len(value["content"]) for value in values] == [1, 0, *[1] * (COUNT - 2)]


async def test_missing_logprob(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="missing_logprob", after=1))
    values = sampled((await events(engine))[1], "logprobs")
    assert [at for at, value in enumerate(values) if value["content"][0]["logprob"] == -9999.0] == [1]


async def test_wrong_usage_and_prompt(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="wrong_usage"), Fault(kind="wrong_prompt"))
    usage = chunks((await events(engine))[1])[-1]["usage"]
    assert usage["completion_tokens"] == COUNT + 1
    assert chunks((await events(engine))[1])[0]["prompt_token_ids"] != engine.prompt(ASKED["messages"])


async def test_no_finish_and_garbage_and_error(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="no_finish"), Fault(kind="garbage", after=1), Fault(kind="error", after=1))
    _, lines, _ = await events(engine)
    assert lines[-2] == b"data: [DONE]\n"
    assert {choice["finish_reason"] for chunk in chunks(lines) for choice in chunk["choices"]} == {None}
    _, lines, _ = await events(engine)
    with pytest.raises(msgspec.DecodeError):
        chunks(lines)
    _, lines, _ = await events(engine)
    assert '"error"' in lines[-4].decode()


async def test_stall_lasts_until_the_client_leaves(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="stall", after=1))
    call = asyncio.create_task(events(engine))
    async with asyncio.timeout(10):
        while not any(run.count for run in engine.running.values()):
            await asyncio.sleep(0.01)
        call.cancel()
        while engine.running:
            await asyncio.sleep(0.01)
    assert engine.left == [engine.sampled[0].key]


async def test_pause_in_the_middle(engine: ScriptedEngine) -> None:
    engine.fail_next("chat", Fault(kind="pause", after=2))
    call = asyncio.create_task(events(engine))
    async with asyncio.timeout(10):
        while not engine.paused:
            await asyncio.sleep(0.01)
    assert [run.count for run in engine.running.values()] == [2]
    engine.resume()
    status, lines, ended = await call
    assert (status, ended, sum(map(len, sampled(lines)))) == (200, True, COUNT)


async def test_faults_of_render(engine: ScriptedEngine) -> None:
    engine.fail_next("render", Fault(kind="status", status=500), Fault(kind="cut"), Fault(delay_s=0.01))
    async with aiohttp.ClientSession() as http:
        url = f"{engine.url}/v1/chat/completions/render"
        async with http.post(url, json=ASKED) as response:
            assert response.status == 500
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await http.post(url, json=ASKED)
        async with http.post(url, json=ASKED) as response:
            assert (await response.json())["token_ids"] == engine.prompt(ASKED["messages"])


# Text and ids


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2))
def test_text_comes_back(text: str, shift: int) -> None:
    ids = encode(text, shift)
    assert decode(ids) == text
    assert all(0 <= token < VOCABULARY for token in ids)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 40)))
def test_text_comes_back_in_pieces(text: str, cuts: list[int]) -> None:
    ids, decoder = encode(text), Decoder()
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    assert "".join(decoder.push(ids[start:end]) for start, end in itertools.pairwise(edges)) == text


def test_drift() -> None:
    """The same text, other ids: a template that renders the reply again does not give what was sampled."""
    straight, drifted = Plan(content="one two three"), Plan(content="one two three", drift=1)
    assert straight.sampled != drifted.sampled
    assert decode(straight.sampled) == decode(drifted.sampled)


CALLED = Plan(content="I look.", reasoning="hm", calls=[("f", {"b": 1, "a": [1, 2]})])


def history(plan: Plan) -> list[dict[str, Any]]:
    """A conversation of one turn, as a client sends it back."""
    message = whole(decode(plan.sampled, control=False), tools=True, thinks=True)
    calls = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in message.calls
    ]
    reply = {"role": "assistant", "content": message.content, "reasoning": message.reasoning, "tool_calls": calls}
    return [{"role": "user", "content": "go"}, reply, {"role": "user", "content": "on"}]


def keeps_ids(template: Template, plan: Plan) -> bool:
    """Whether the second prompt begins with the first and what was sampled on it."""
    messages = history(plan)
    first = encode(template.render(messages[:1], None, generation=True))
    second = encode(template.render(messages, None, generation=True))
    known = [*first, *plan.sampled]
    return second[: len(known)] == known


@pytest.mark.parametrize(
    "plan",
    [
        CALLED,
        Plan(content="I look.\n"),
        Plan(calls=[("f", {}), ("g", {"x": "é"})]),
        Plan(content="I look.", calls=[("f", {})]),
        Plan(content="  two\n\nlines", reasoning="\nhm\n"),
    ],
)
def test_template_without_habits_keeps_the_ids(plan: Plan) -> None:
    assert keeps_ids(Template(), plan)


@pytest.mark.parametrize("habit", ["strip_reasoning", "reserialise", "no_think"])
def test_each_habit_rewrites_history(habit: str) -> None:
    assert not keeps_ids(Template(**{habit: True}), CALLED)


def test_drift_rewrites_history() -> None:
    assert not keeps_ids(Template(), msgspec.structs.replace(CALLED, drift=1))


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "x", "<tool", "\n"])))
def test_what_was_told_is_never_taken_back(parts: list[str]) -> None:
    text = "".join(parts)
    before = told("", tools=True, thinks=True)
    for end in range(len(text) + 1):
        after = told(text[:end], tools=True, thinks=True)
        assert after.content.startswith(before.content)
        assert [name for name, _ in after.calls][: len(before.calls)] == [name for name, _ in before.calls]
        before = after


# Scripts


def turn(*said: str, last: str = "go") -> Turn:
    messages = [{"role": "user", "content": "go"}]
    for reply in said:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": last}]
    return Turn(encode(Template().render(messages, None, generation=True)), "chat", None)


def test_scripts() -> None:
    one, two = Plan(content="one"), Plan(content="two")
    assert [by_turn(one, two)(turn(*["hm"] * count)) for count in range(4)] == [one, two, two, two]
    ordered = in_order(one, two)
    assert [ordered(turn()) for _ in range(3)] == [one, two, two]
    worded = by_last_word({"": one, "quickly": two})
    assert [worded(turn("hm", last=last)) for last in ("go on", "go quickly", "quickly", "quickly now")] == [
        one,
        two,
        one,
        one,
    ]
