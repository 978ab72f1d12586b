"""The scripted engine's derender against real vLLM's: the same text, cut alike, gives the same messages and deltas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from both_engines import (
    ASKED,
    CALL,
    DERENDER,
    TOOL,
    TURN_END,
    Answer,
    Asking,
    Both,
    alike,
    shape,
    side_by_side,
    without_ids,
)
from engine_fixture import RunningEngine

pytestmark = pytest.mark.engine


@pytest.fixture
async def both(engine: RunningEngine) -> AsyncIterator[Both]:
    async with side_by_side(engine.url) as together:
        yield together


TEXTS = {
    "text": "look here, then go",
    "one call": CALL,
    "text and call": f"look\n{CALL}",
    "two calls": f"{CALL}\n{CALL.replace('a b', 'c')}",
    "call without line ends": CALL.replace("\n", ""),
    "call and text": f"{CALL} and more",
    "call that is no JSON": '<tool_call>\n{"name": "write_file", "arguments": {"path": oops}\n</tool_call>',
    "call without arguments": '<tool_call>\n{"name": "write_file"}\n</tool_call>',
    "call without name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "call that is not finished": '<tool_call>\n{"name": "write_file", "arguments": {"path": "a',
    "a list as arguments": '<tool_call>\n{"name": "write_file", "arguments": [1, 2]}\n</tool_call>',
    "unicode": '<tool_call>\n{"name": "write_file", "arguments": {"path": "é€ \\u00e9"}}\n</tool_call>',
    "almost a call": "a <tool and <tool_cal",
}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("case", TEXTS)
async def test_whole_derender(both: Both, case: str, tools: bool) -> None:
    request = ASKED | ({"tools": [TOOL]} if tools else {})
    answers = []
    for asking in (both.real, both.fake):
        prompt = await asking.render(**request)
        choice = {"index": 0, "token_ids": [*await asking.ids(TEXTS[case]), TURN_END], "finish_reason": "stop"}
        body = {
            "chat_request": request,
            "generate_response": {"request_id": "w", "choices": [choice]},
            "prompt_tokens": len(prompt["token_ids"]),
            "prompt_token_ids": prompt["token_ids"],
        }
        answers.append(await asking.ask(DERENDER, body))
    real, fake = answers
    alike(real, fake)
    first, second = (one.body["choices"][0] for one in answers)
    assert second["finish_reason"] == first["finish_reason"] == "stop"
    assert without_ids(second["message"]) == without_ids(first["message"])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("case", TEXTS)
async def test_derender_in_pieces(both: Both, case: str, size: int) -> None:
    """Cut alike, both give the same deltas, one for one; and together what the whole text gives."""
    text = TEXTS[case]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    streams = []
    for asking in (both.real, both.fake):
        request = ASKED | {"tools": [TOOL]}
        prompt = (await asking.render(**request))["token_ids"]
        streams.append([one async for one in derendered(asking, request, prompt, pieces)])
    real, fake = streams
    for first, second in zip(real, fake, strict=True):
        alike(first, second)
        one, other = (answer.body["chunk"]["choices"][0] for answer in (first, second))
        assert other["finish_reason"] == one["finish_reason"]
        assert unnamed(other["delta"]) == unnamed(one["delta"])
        states = [answer.body["stream_state"] for answer in (first, second)]
        assert states[1]["tools_streamed"] == states[0]["tools_streamed"]
        assert len(states[1]["last_tool_call_ids"]) == len(states[0]["last_tool_call_ids"])


async def derendered(
    asking: Asking, request: dict[str, Any], prompt: list[int], pieces: list[str]
) -> AsyncIterator[Answer]:
    state = None
    for number, piece in enumerate(pieces, 1):
        finish = "stop" if number == len(pieces) else None
        choice = {"index": 0, "token_ids": await asking.ids(piece), "finish_reason": finish}
        body = {
            "stream": True,
            "chat_request": request,
            "generate_chunk": {"request_id": "p", "choices": [choice]},
            "stream_state": state,
            "prompt_token_ids": prompt,
        }
        answer = await asking.ask(DERENDER, body)
        state = answer.body["stream_state"]
        yield answer


def unnamed(delta: dict[str, Any]) -> dict[str, Any]:
    """Without the ids of calls, but with whether there is one."""
    calls = [call | {"id": bool(call["id"])} for call in delta.get("tool_calls") or []]
    return delta | {"tool_calls": calls}


CHOICE = {"index": 0, "token_ids": [5], "finish_reason": None}


@pytest.mark.parametrize(
    "body",
    [
        {"generate_response": {"request_id": "w", "choices": [CHOICE]}},
        {"chat_request": ASKED, "generate_response": {"request_id": "w", "choices": [CHOICE | {"token_ids": []}]}},
        {"stream": True, "chat_request": ASKED, "generate_chunk": {"request_id": "w", "choices": [CHOICE]}},
        {
            "chat_request": ASKED | {"stream_options": {"include_usage": True}},
            "generate_response": {"request_id": "w", "choices": [CHOICE]},
        },
    ],
)
async def test_refused_derender(both: Both, body: dict[str, Any]) -> None:
    real, fake = await both.ask(DERENDER, body)
    alike(real, fake)
    assert fake.body == real.body


async def test_state_that_does_not_fit(both: Both) -> None:
    body = {
        "stream": True,
        "chat_request": ASKED,
        "generate_chunk": {"request_id": "w", "choices": [CHOICE]},
        "stream_state": {"output_token_ids": [1], "output_chunk_lens": []},
        "prompt_token_ids": [1],
    }
    real, fake = await both.ask(DERENDER, body)
    assert (fake.status, shape(fake.body)) == (real.status, shape(real.body))
