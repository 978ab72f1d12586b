"""Writes the response of one call to its client, streamed or whole, and sees to it that the call has its end.

The order that both keep: sampled → call.completed acknowledged → end of the response written → call.delivery.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from gateway_app.capture import Call, Failure, classify
from gateway_app.client import Client
from gateway_app.dialects.openai_chat import ChatRequest, OpenAIChat, StreamedMessage, clean_message
from gateway_app.sample import InexactSample
from polar.engine.client import EngineClient, EngineError
from streams.errors import StreamError

RETRY_AFTER = {"retry-after": "2"}


def session_ended() -> Failure:
    """For a client that is still there when its attempt has ended."""
    return Failure("session_ended", "this session has ended", 403, infrastructure=False)


async def answer(engine: EngineClient, call: Call, request: ChatRequest, client: Client) -> None:
    """Everything after call.started. A failure goes to the record and to the client, in the dialect's shape."""
    dialect = OpenAIChat(call.call_id, request.model)
    write = _streamed if request.streamed else _whole
    try:
        await write(engine, call, request, client, dialect)
    except (EngineError, InexactSample, StreamError, Failure) as error:
        failure = error if isinstance(error, Failure) else classify(error)
        await call.fail(failure)
        if client.started:
            await client.write_events(dialect.stream_error(failure.detail, failure.reason))
        else:
            await refuse(client, failure)


async def refuse(client: Client, failure: Failure) -> None:
    """An error response. Agent programs wait and try again at 503, so Retry-After says when."""
    headers = RETRY_AFTER if failure.status == 503 else {}
    await client.respond(failure.status, OpenAIChat.error(failure.status, failure.detail, code=failure.reason), headers)


async def _streamed(
    engine: EngineClient, call: Call, request: ChatRequest, client: Client, dialect: OpenAIChat
) -> None:
    message, state, finish_reason = StreamedMessage(), None, "abort"
    async with aclosing(call.pieces()) as pieces:
        async for piece in pieces:
            if piece is None:
                await client.write_events(dialect.keep_alive())
            elif not call.stop.is_set():
                choice, state = await engine.derender_delta(call.chat_request, call.prompt_ids, piece.choice(), state)
                delta = call.cut_at_stop(clean_message(choice["delta"]))
                message.add(delta)
                finish_reason = choice["finish_reason"] or finish_reason
                if delta:
                    await client.write_events(dialect.delta(delta))
    if call.stop.is_set():
        finish_reason = call.sample.finish_reason or finish_reason
    await call.complete(message.whole(), finish_reason)
    if finish_reason == "abort":
        ended = session_ended()
        await client.write_events(dialect.stream_error(ended.detail, ended.reason))
        await call.delivery(False)
        return
    usage = call.sample.usage if request.include_usage else None
    await client.write_events(dialect.finish(finish_reason, usage))
    await call.delivery(await client.received() and not call.stop.is_set())


async def _whole(engine: EngineClient, call: Call, request: ChatRequest, client: Client, dialect: OpenAIChat) -> None:
    async with aclosing(call.pieces()) as pieces:
        async for _ in pieces:
            pass
    choice = await _derendered(engine, call, request)
    message: dict[str, Any] = {"content": None} | call.cut_at_stop(clean_message(choice["message"]))
    finish_reason: str = choice["finish_reason"]
    if message.get("tool_calls") and finish_reason == "stop":
        finish_reason = "tool_calls"
    await call.complete(message, finish_reason)
    if finish_reason == "abort":
        await refuse(client, session_ended())
        await call.delivery(False)
        return
    await client.respond(200, dialect.whole(message, finish_reason, choice.get("logprobs"), call.sample.usage))
    await call.delivery(await client.received() and not call.stop.is_set())


async def _derendered(engine: EngineClient, call: Call, request: ChatRequest) -> dict[str, Any]:
    sample, shown = call.sample, call.sample.shown
    ending: dict[str, Any] = {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
    if not shown:
        return {"message": {"role": "assistant", "content": ""}} | ending
    choice = {"token_ids": sample.ids[:shown]} | ending
    if request.logprobs:
        pairs = zip(sample.ids[:shown], sample.logprobs[:shown], strict=True)
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
    return (await engine.derender(call.chat_request, call.prompt_ids, choice))["choices"][0]
