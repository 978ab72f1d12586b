"""vLLM's token-in, token-out endpoints.

A chat request becomes ids by ``render``, the ids are sampled from by ``generate``, and sampled ids become text and tool
calls by ``derender`` or, piece by piece, ``derender_delta``. No tokenizer and no tool parser lives on our side.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polar.engine.chunks import Choice, Derendered, decode_derendered
from polar.engine.client import QUICK, EngineClient, EngineFault, EventStream, only_choice, read_chunk

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
ABORT = "/inference/v1/abort_requests"

ChatRequest = dict[str, Any]

STREAMED = {"return_token_ids": False, "stream": True, "stream_options": {"include_usage": True}}
"""Sampled ids are always told; ``return_token_ids`` would only send the prompt's back."""


class Rendered(msgspec.Struct, frozen=True):
    """A prompt and how it is to be sampled. ``body`` has the other fields that ``generate`` wants."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    body: dict[str, Any]

    @property
    def token_json(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(self.token_ids))


async def render(engine: EngineClient, request: ChatRequest) -> Rendered:
    """Raises EngineRefused for a request that the engine does not accept (also: too long for the context)."""
    content = await engine.post(RENDER, msgspec.json.encode(request))
    try:
        body = msgspec.json.decode(content)
        return Rendered(body.pop("token_ids"), body.pop("sampling_params"), body)
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
        raise EngineFault(f"{RENDER}: an answer that cannot be read ({error!r})") from error


def generate(engine: EngineClient, rendered: Rendered, ids: msgspec.Raw, request_id: str) -> EventStream:
    """Samples from ``ids``, the JSON of the token ids.

    The last chunk with a choice has ``finish_reason`` and the version spans; then one has the usage.
    """
    sampling = rendered.sampling_params | {"logprobs": max(rendered.sampling_params.get("logprobs") or 0, 0)}
    body = rendered.body | STREAMED
    body |= {"token_ids": ids, "sampling_params": sampling, "request_id": request_id}
    return engine.stream(GENERATE, msgspec.json.encode(body))


async def abort(engine: EngineClient, request_id: str) -> None:
    """Ends a request that ``generate`` was given as ``request_id``; its stream ends with the reason ``abort``."""
    body = {"request_ids": [f"generate-tokens-{request_id}"]}
    await engine.post(ABORT, msgspec.json.encode(body), timeout=QUICK)


class Derenderer:
    """Turns the sampled ids of one response into text and tool calls, with the engine's own parsers.

    Of the request's messages the parsers only count tool calls, so that is all that is sent of them.
    """

    def __init__(self, engine: EngineClient, request: ChatRequest, prompt_ids: msgspec.Raw) -> None:
        self._engine = engine
        short = request | {"messages": _outline(request["messages"])}
        self._request = msgspec.json.encode(short)
        self._prompt = bytes(prompt_ids)
        self._state = b"null"

    async def whole(self, choice: dict[str, Any]) -> Choice:
        """The choice of a chat completion, with its ``message``."""
        response = msgspec.json.encode({"request_id": "whole", "choices": [{"index": 0, **choice}]})
        content = await self._engine.post(DERENDER, self._body(b'"generate_response":' + response))
        return only_choice(DERENDER, read_chunk(DERENDER, content))

    async def delta(self, choice: dict[str, Any]) -> Choice:
        """The next tokens of a response to the choice of a chat chunk."""
        chunk = msgspec.json.encode({"request_id": "delta", "choices": [{"index": 0, **choice}]})
        piece = b'"stream":true,"generate_chunk":' + chunk + b',"stream_state":' + self._state
        content = await self._engine.post(DERENDER, self._body(piece))
        try:
            derendered: Derendered = decode_derendered(content)
        except msgspec.MsgspecError as error:
            raise EngineFault(f"{DERENDER}: an answer that cannot be read ({error})") from error
        self._state = bytes(derendered.stream_state)
        return only_choice(DERENDER, derendered.chunk)

    def _body(self, piece: bytes) -> bytes:
        return b'{"chat_request":' + self._request + b',"prompt_token_ids":' + self._prompt + b"," + piece + b"}"


def _outline(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    called = [call for message in messages for call in message.get("tool_calls") or []]
    outline: list[dict[str, Any]] = [{"role": "user", "content": ""}]
    if called:
        names = [{**call, "function": {"name": call["function"]["name"], "arguments": "{}"}} for call in called]
        outline.append({"role": "assistant", "content": "", "tool_calls": names})
    return outline
