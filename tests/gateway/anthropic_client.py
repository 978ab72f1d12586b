"""An agent program's side of the Messages dialect: requests, and what an SDK makes of the events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway_app.dialects.anthropic_messages import AnthropicMessages
from gateway_app.dialects.anthropic_request import UNPARSED
from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Usage

DIALECT = AnthropicMessages()
REQUEST = ModelRequest(model="policy", messages=[])


def ended(reason: Any = "stop", stop_sequence: str | None = None) -> Ended:
    return Ended(finish_reason=reason, usage=Usage(prompt=100, completion=7, cached=64), stop_sequence=stop_sequence)


def parse(messages: list[Any], **fields: Any) -> ModelRequest:
    body = {"model": "policy", "max_tokens": 100, "messages": messages} | fields
    return DIALECT.parse(json.dumps(body).encode())


def refused(messages: list[Any], **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(messages, **fields)
    return caught.value


def say(text: str = "hello") -> dict[str, Any]:
    return {"role": "user", "content": text}


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event; its ``event:`` line is checked against the type."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    return found


def streamed(deltas: list[Delta], end: Ended) -> bytes:
    writer = DIALECT.writer(REQUEST, "c1")
    return writer.start(100) + b"".join(map(writer.delta, deltas)) + writer.end(end)


def assembled(stream: bytes) -> dict[str, Any]:
    """What an SDK makes of the events. Blocks are numbered in their order, and closed once each."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    closed: set[int] = set()
    for event in events(stream):
        kind, index = event["type"], event.get("index", 0)
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert index == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif kind == "content_block_delta":
            assert index not in closed
            grow(blocks[index], event["delta"])
        elif kind == "content_block_stop":
            assert index not in closed
            closed.add(index)
        elif kind == "message_delta":
            assert len(closed) == len(blocks)
            message |= event["delta"] | {"usage": event["usage"]}
    return message | {"content": [as_sent_back(block) for block in blocks]}


def grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind = delta.pop("type")
    allowed = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}}
    assert kind in allowed.get(block["type"], {"input_json_delta"})
    for name, text in delta.items():
        block["json" if name == "partial_json" else name] += text


def as_sent_back(block: dict[str, Any]) -> dict[str, Any]:
    """As Claude Code puts it into its history."""
    text = block.pop("json")
    if block["type"] == "tool_use":
        value = parsed(text)
        block["input"] = {UNPARSED: {"raw": text, "len": len(text)}} if isinstance(value, str) else value
    return block


def parsed(arguments: str) -> Any:
    """The object, or the text where it is none. No arguments at all are an empty object."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    return value if isinstance(value, dict) and UNPARSED not in value else arguments


def meaning(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        (call["id"], call["function"]["name"], parsed(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
    }


def history(content: list[Any]) -> dict[str, Any]:
    """The message that a response becomes when it is sent back."""
    results = [{"type": "tool_result", "tool_use_id": b["id"]} for b in content if b["type"] == "tool_use"]
    return parse([{"role": "assistant", "content": content}, {"role": "user", "content": results or "on"}]).messages[0]
