"""Real vLLM and the scripted engine side by side: the same request to both, and what counts as the same answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from scripted_engine import ScriptedEngine

CHAT, RENDER, DERENDER = (f"/v1/chat/completions{name}" for name in ("", "/render", "/derender"))
GENERATE = "/inference/v1/generate"
CONTEXT = 8192
TURN_END = 2
"""``<|im_end|>`` in both tokenizers."""

TOOL = {
    "type": "function",
    "function": {"name": "write_file", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "a b"}}\n</tool_call>'
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hello world"}], "temperature": 1.0, "seed": 1}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class Answer(msgspec.Struct, frozen=True):
    """``events`` are those of a stream, ``[DONE]`` as a string."""

    status: int
    kind: str
    body: Any = None
    events: list[Any] = []


class Asking:
    """One of the two engines."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def ask(self, path: str, body: Any = None, method: str = "POST", **options: Any) -> Answer:
        options = options or ({"json": body} if body is not None else {})
        async with self.http.request(method, self.url + path, **options) as response:
            content = await response.read()
        kind = response.content_type
        if kind == "text/event-stream":
            data = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
            events = ["[DONE]" if one == b"[DONE]" else msgspec.json.decode(one) for one in data]
            return Answer(response.status, kind, None, events)
        return Answer(response.status, kind, msgspec.json.decode(content) if content else None)

    async def render(self, **changes: Any) -> dict[str, Any]:
        return (await self.ask(RENDER, ASKED | changes)).body

    async def ids(self, text: str) -> list[int]:
        if not text:
            return []
        body = {"model": "policy", "prompt": text, "add_special_tokens": False}
        return (await self.ask("/tokenize", body)).body["tokens"]


class Both:
    """Real vLLM and the scripted engine, side by side."""

    def __init__(self, real: Asking, fake: Asking, script: ScriptedEngine) -> None:
        self.real, self.fake, self.script = real, fake, script

    async def ask(self, path: str, body: Any = None, **options: Any) -> tuple[Answer, Answer]:
        return await self.real.ask(path, body, **options), await self.fake.ask(path, body, **options)


@asynccontextmanager
async def side_by_side(url: str) -> AsyncIterator[Both]:
    """``url`` is the real engine's."""
    script = ScriptedEngine(max_model_len=CONTEXT)
    async with aiohttp.ClientSession() as http, script.serving():
        yield Both(Asking(url, http), Asking(script.url, http), script)


def shape(value: Any) -> Any:
    """Keys in their order and types, through and through. ``bytes`` may be empty, in the middle of a character."""
    if isinstance(value, dict):
        return [(name, "ints" if name == "bytes" else shape(one)) for name, one in value.items()]
    if isinstance(value, list):
        return {repr(shape(one)) for one in value}
    return type(value).__name__


def envelopes(events: list[Any]) -> list[Any]:
    """The shapes of a stream's events in order, each run once, without what they tell: tokens may come together."""
    found: list[Any] = []
    for event in events:
        bare = event
        if isinstance(event, dict):
            bare = event | {"choices": [{**one, "delta": None} for one in event["choices"]]}
        if not found or shape(bare) != found[-1]:
            found.append(shape(bare))
    return found


def told(events: list[Any]) -> set[str]:
    """The shapes of what a stream's deltas tell: of a text, of a call's beginning, of a piece of its arguments."""
    found = set()
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else []:
            delta = choice.get("delta", {})
            found |= {
                repr((name, shape(one))) for name, one in delta.items() if name != "tool_calls" and one is not None
            }
            for call in delta.get("tool_calls", []):
                function = call["function"]
                for name in function:
                    found.add(repr(shape(call | {"function": {name: function[name]}})))
    return found


def reasons(answer: Answer) -> list[Any]:
    choices = [one for event in answer.events if isinstance(event, dict) for one in event["choices"]]
    return [(one["finish_reason"], one.get("stop_reason")) for one in choices if one["finish_reason"]]


def alike(real: Answer, fake: Answer) -> None:
    assert (fake.status, fake.kind) == (real.status, real.kind)
    assert shape(fake.body) == shape(real.body)
    rest = iter(envelopes(fake.events))
    assert all(one in rest for one in envelopes(real.events)), "in order; of tokens that come together some are missing"
    assert told(fake.events) == told(real.events)
    assert reasons(fake) == reasons(real)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the functions of its calls only."""
    calls = message.get("tool_calls") or []
    return message | {"tool_calls": [call["function"] for call in calls]}
