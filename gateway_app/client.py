"""The client's side of one response, at the ASGI level: who reads must know whether anyone is still there.

A server drops silently what is sent to a closed connection, so the disconnect is listened for all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

LOOKS = 4
"""Turns of the loop from a closed socket to the event that tells it."""
WRITE_S = 60.0
"""A client that takes nothing for so long is gone."""


class TooLarge(Exception):
    """A body over the limit."""


class Client:
    """An async context manager around a response, after the request's body was read. ``on_leave`` is told once."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.gone = False
        self.started = False
        self.on_leave: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Client:
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()

    async def start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, content: bytes) -> None:
        await self._put({"type": "http.response.body", "body": content, "more_body": True})

    async def look(self) -> None:
        """Notices a close that lies in the socket. To be called before the last write: after it a client may go."""
        for _ in range(LOOKS):
            await asyncio.sleep(0)

    async def end(self) -> None:
        if self.started and not self.gone:
            await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        if self.gone:
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
        if not self.gone:
            self.gone = True
            self.on_leave()


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The request's whole body; None where the client left before its end. Raises TooLarge."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge
        parts.append(part)
        if not message.get("more_body"):
            return part if len(parts) == 1 else b"".join(parts)
