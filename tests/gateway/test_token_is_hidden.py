"""The session token is on no topic and in no log, though agents read it, send it and repeat it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from capture_stand import Engine, Log, token

from gateway_app.capture import Call, Capture, Failure
from gateway_app.dialects.openai_chat import ChatRequest, OpenAIChat
from gateway_app.history import AttemptHistory
from polar.engine.chunks import GenerateChunk
from polar.engine.client import EngineClient
from schemas.packed import unpack_ids
from schemas.sessions import CallCompleted, CallStarted

SESSION = token()
RESPONSE = {
    "choices": [
        {
            "token_ids": [7],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "1", "start": 0, "end": 1}],
        }
    ],
    "usage": {"completion_tokens": 1},
}


def request(messages: list[Any]) -> ChatRequest:
    return OpenAIChat.parse(msgspec.json.encode({"model": "m", "messages": messages}))


async def answered(capture: Capture, history: AttemptHistory, asked: ChatRequest, answer: dict[str, Any]) -> Call:
    call = await capture.start(SESSION, history, asked, "openai.chat", asyncio.Event())
    call.sample.take(msgspec.convert(RESPONSE, GenerateChunk))
    await call.complete(answer, "stop")
    return call


async def test_the_token_is_hidden_in_the_record_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://gateway/s/{SESSION.raw}/v1"
    log, history = Log(), AttemptHistory()
    first = [{"role": "user", "content": [{"type": "text", "text": f"OPENAI_BASE_URL={url}"}]}]
    arguments = msgspec.json.encode({"command": f"curl {url}"}).decode()
    answer = {"role": "assistant", "content": url, "tool_calls": [{"function": {"arguments": arguments}}]}
    second = [*first, answer, {"role": "tool", "content": f"{url}{url}"}]
    async with Engine().running() as engine_url, EngineClient(engine_url) as engine:
        capture = Capture(engine, log, policy="policy", hold_s=0)  # type: ignore[arg-type]
        await answered(capture, history, request(first), answer)
        call = await answered(capture, history, request(second), {"role": "assistant", "content": "done"})
        with caplog.at_level(logging.WARNING):
            await call.fail(Failure("request_refused", f"input was {'x' * 1960}{url}", 400, infrastructure=False))

    events = [event for event in log.records if isinstance(event, CallStarted)]
    assert call.chat_request["messages"] == second
    assert [unpack_ids(event.prompt_ids).tolist() for event in events] == [[1, 2], []]
    assert (events[1].kept_messages, events[1].kept_ids) == (2, 2)
    [answered_first, _] = [event for event in log.records if isinstance(event, CallCompleted)]
    told = [*events[0].messages, answered_first.message, *events[1].messages]
    assert told == msgspec.json.decode(msgspec.json.encode(second).replace(SESSION.raw.encode(), b"[token]"))
    everything = msgspec.json.encode(log.records).decode() + caplog.text
    assert SESSION.raw[:12] not in everything
    assert everything.count("http://gateway/s/[token]/v1") == 7
