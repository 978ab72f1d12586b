"""The client's side of one response, at the ASGI level: who reads must know whether anyone is still there.

A server drops silently what is sent to a closed connection, so the disconnect is listened for all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

WRITE_S = 60.0
"""A client that takes nothing for so long is gone."""

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Client:
    """An async context manager around a response, after the request's body was read. Sets ``stop`` when it leaves."""

    def __init__(self, receive: Receive, send: Send, stop: asyncio.Event) -> None:
        self._receive = receive
        self._send = send
        self._stop = stop
        self._gone = False
        self.started = False

    async def __aenter__(self) -> Client:
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def respond(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole JSON response, but for its end."""
        await self._start(status, JSON | {"content-length": str(len(content))} | (headers or {}))
        await self._write(content)

    async def write_events(self, events: bytes) -> None:
        """Server-sent events; the headers go with the first."""
        if not self.started:
            await self._start(200, EVENTS)
        await self._write(events)

    async def received(self) -> bool:
        """Whether all was written and the client has not closed; before ``end``, which closes it on our side."""
        # A close that lies in the socket is seen after the loop has polled it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return not self._gone

    async def end(self) -> None:
        if self.started and not self._gone:
            await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, content: bytes) -> None:
        await self._put({"type": "http.response.body", "body": content, "more_body": True})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        if self._gone:
            return
        try:
            async with asyncio.timeout(WRITE_S):
                await self._send(message)
        except (OSError, TimeoutError):
            self._leave()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._gone = True
        self._stop.set()
