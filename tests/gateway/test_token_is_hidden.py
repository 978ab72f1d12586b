"""The session token is on no topic and in no log, though agents read it, send it and repeat it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from capture_stand import Engine, Log, call, sampler, token

from gateway_app.call import Call
from gateway_app.dialects.dialect import Ended, Reply, ToolCall, Usage
from gateway_app.failures import Failure
from gateway_app.history import AttemptHistory
from gateway_app.stopping import Stop
from polar.engine.chunks import Chunk
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
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}
ENDED = Ended(finish_reason="stop", usage=Usage(prompt=2, completion=1))


async def answered(log: Log, client: EngineClient, history: AttemptHistory, messages: list[Any], reply: Reply) -> Call:
    one = call(log, sampler(client), messages, Stop(), history)
    sampling = sampler(client).sampling(one)
    await sampling.open()
    await sampling.close()
    one.sample.take(msgspec.convert(RESPONSE, Chunk))
    await one.complete(reply, ENDED, "stop")
    return one


async def test_the_token_is_hidden_in_the_record_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://gateway/s/{SESSION.raw}/v1"
    log, history = Log(), AttemptHistory()
    first = [{"role": "user", "content": [{"type": "text", "text": f"OPENAI_BASE_URL={url}"}]}]
    arguments = msgspec.json.encode({"command": f"curl {url}"}).decode()
    answer = Reply(content=url, tool_calls=[ToolCall(id="1", name="bash", arguments=arguments)])
    second = [*first, answer.message(), {"role": "tool", "tool_call_id": "1", "content": f"{url}{url}"}]
    async with Engine().running() as engine_url, EngineClient(engine_url) as engine:
        await answered(log, engine, history, first, answer)
        one = await answered(log, engine, history, second, Reply(content="done"))
        with caplog.at_level(logging.WARNING):
            await one.fail(Failure("request_refused", f"input was {'x' * 1960}{url}", 400))

    events = [event for event in log.records if isinstance(event, CallStarted)]
    assert one.chat_request["messages"] == second
    assert [unpack_ids(event.prompt_ids).tolist() for event in events] == [[1, 2], []]
    assert (events[1].kept_messages, events[1].kept_ids) == (2, 2)
    [answered_first, _] = [event for event in log.records if isinstance(event, CallCompleted)]
    told = [*events[0].messages, answered_first.message, *events[1].messages]
    assert told == msgspec.json.decode(msgspec.json.encode(second).replace(SESSION.raw.encode(), b"[token]"))
    everything = msgspec.json.encode(log.records).decode() + caplog.text
    assert SESSION.raw[:12] not in everything
    assert everything.count("http://gateway/s/[token]/v1") == 7
