"""A client that costs little and times precisely: one connection, one call at a time, on asyncio's own protocols."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

CONTENT = re.compile(rb'"content":\s?"[^"]')
"""The first piece of text. The opening event's content is empty."""
END_OF_BODY = b"0\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)

LONGEST_S = 60.0


class CallFailed(Exception):
    """A call that was not answered as it should. The message shows the beginning of the answer."""


class Timing(msgspec.Struct, frozen=True):
    """Seconds from the first byte sent to the first text, and to the end of the answer."""

    first_s: float
    total_s: float


class Caller(asyncio.Protocol):
    """Keeps its connection. ``call`` may be used by one task at a time."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._transport: Any = None
        self._answer: asyncio.Future[Timing] | None = None

    async def call(self, path: str, body: bytes, *, streamed: bool) -> Timing:
        """Raises CallFailed unless the answer is a whole 200; of a stream, with its end."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            self._transport, _ = await loop.create_connection(lambda: self, self._host, self._port)
        self._received, self._first, self._streamed = bytearray(), 0.0, streamed
        self._missing: int | None = None
        self._chunked = False
        self._answer = loop.create_future()
        fields = f"host: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + body)
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self._answer
        except TimeoutError:
            raise CallFailed(f"no end after {LONGEST_S:.0f} s: {bytes(self._received[-300:])!r}") from None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._received += data
        if self._streamed and not self._first and CONTENT.search(self._received):
            self._first = now
        if self._missing is None and not self._chunked:
            head, blank, rest = self._received.partition(b"\r\n\r\n")
            if not blank:
                return
            length = LENGTH.search(head + b"\r\n")
            self._chunked = length is None
            self._missing = int(length[1]) - len(rest) if length else None
        elif self._missing is not None:
            self._missing -= len(data)
        if self._received.endswith(END_OF_BODY) if self._chunked else self._missing == 0:
            failed = self._streamed and (b"data: [DONE]" not in self._received or b'"error"' in self._received)
            self._end(now, not failed)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallFailed(f"the connection was closed after {bytes(self._received[-300:])!r}"))

    def _end(self, now: float, whole: bool) -> None:
        if self._answer is None or self._answer.done():
            return
        if whole and self._received.startswith(b"HTTP/1.1 200"):
            self._answer.set_result(Timing((self._first or now) - self._sent, now - self._sent))
        else:
            self._answer.set_exception(CallFailed(bytes(self._received[:600]).decode(errors="replace")))
