"""A gateway in the test's own loop, under uvicorn on a free port, with tokens for its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gateway_app.gateway import Gateway, create_app, gateway
from gateway_app.serve import listen, serve
from polar.session_token import sign
from polar.settings import Settings
from schemas.sessions import SessionRecord
from streams.consumer import Reader
from streams.topics import SESSIONS

SECRET = "a secret of thirty-two characters"


class Answer(msgspec.Struct, frozen=True):
    """``events`` are the data of a stream, without ``[DONE]``; ``done`` says whether that came."""

    status: int
    headers: dict[str, str]
    body: Any = None
    events: list[dict[str, Any]] = []
    done: bool = False

    def text(self) -> str:
        deltas = [choice["delta"] for event in self.events for choice in event.get("choices", [])]
        return "".join(delta.get("content") or "" for delta in deltas)

    def message(self) -> dict[str, Any]:
        """The assistant message, streamed or not."""
        if self.body is not None:
            return self.body["choices"][0]["message"]
        message: dict[str, Any] = {"role": "assistant", "content": self.text() or None}
        deltas = [choice["delta"] for event in self.events for choice in event.get("choices", [])]
        if reasoning := "".join(delta.get("reasoning_content") or "" for delta in deltas):
            message["reasoning_content"] = reasoning
        calls: dict[int, dict[str, Any]] = {}
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or []):
            empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(piece["index"], empty)
            call["id"] = call["id"] or piece.get("id", "")
            for name in ("name", "arguments"):
                call["function"][name] += piece.get("function", {}).get(name) or ""
        return message | ({"tool_calls": list(calls.values())} if calls else {})

    def finish_reasons(self) -> list[str]:
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


class Stand:
    """Speaks to the gateway as an agent program does."""

    def __init__(self, url: str, http: aiohttp.ClientSession, gateway: Gateway) -> None:
        self.url = url
        self.http = http
        self.gateway = gateway

    def base(self, session_id: str, attempt: int = 0, ttl_s: float = 600) -> str:
        return f"{self.url}/s/{sign(SECRET, session_id, attempt, ttl_s)}/v1"

    async def chat(self, base: str, **body: Any) -> Answer:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello world"}]} | body
        async with self.http.post(f"{base}/chat/completions", json=body) as response:
            content = await response.read()
            headers = dict(response.headers)
            if not headers["Content-Type"].startswith("text/event-stream"):
                return Answer(response.status, headers, msgspec.json.decode(content))
        data = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
        events = [msgspec.json.decode(item) for item in data if item != b"[DONE]"]
        return Answer(response.status, headers, None, events, b"[DONE]" in data)


@asynccontextmanager
async def stand(
    tmp_path: Path, kafka: str, engine_url: str, publish_s: float = 15.0, **settings: Any
) -> AsyncIterator[Stand]:
    """``settings`` are fields of ``polar.settings.Settings``."""
    given = {"run_dir": tmp_path, "kafka_bootstrap": kafka, "engine_url": engine_url, "session_secret": SECRET}
    stop = asyncio.Event()
    listening = listen("127.0.0.1", 0)
    async with (
        gateway(Settings(**(given | settings)), publish_s=publish_s) as ready,
        aiohttp.ClientSession() as http,
    ):
        serving = asyncio.create_task(serve(create_app(ready), listening, stop))
        try:
            yield Stand(f"http://127.0.0.1:{listening.getsockname()[1]}", http, ready)
        finally:
            stop.set()
            await serving


async def story(kafka: str, session_id: str) -> list[SessionRecord]:
    """The events of one session, in order."""
    async with Reader(kafka, [SESSIONS], source="test") as reader:
        return [one.record for one in await reader.read_to_end() if one.record.session_id == session_id]


async def story_until(kafka: str, session_id: str, kind: type, count: int = 1) -> list[SessionRecord]:
    """The story once it has ``count`` events of ``kind``. Raises TimeoutError."""
    events: list[SessionRecord] = []
    async with asyncio.timeout(30), Reader(kafka, [SESSIONS], source="test") as reader:
        while sum(isinstance(event, kind) for event in events) < count:
            events += [one.record for one in await reader.poll(0.5) if one.record.session_id == session_id]
    return events
