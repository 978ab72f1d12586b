"""HTTP/1.1 on asyncio and httptools: one request at a time per connection, bodies whole, answers whole or chunked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qs

import httptools

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    500: b"Internal Server Error",
}
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Request:
    """``body`` is what came; ``query`` has the last value of each name."""

    __slots__ = ("body", "headers", "method", "path", "query")

    def __init__(self, method: str, target: bytes, headers: dict[bytes, bytes], body: bytes) -> None:
        path, _, query = target.partition(b"?")
        self.method, self.path, self.headers, self.body = method, path.decode(), headers, body
        self.query = {name: values[-1] for name, values in parse_qs(query.decode()).items()} if query else {}


class Handler(Protocol):
    def handle(self, connection: Connection, request: Request) -> None: ...


class Connection(asyncio.Protocol):
    """``on_lost`` is called once if the client leaves before its answer is whole."""

    transport: Any

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._parser: Any = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._busy = False
        self._keep = True
        self._writable: Callable[[], None] | None = None
        self.blocked = False
        self.on_lost: Callable[[], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._target, self._headers, self._body = b"", {}, []

    # asyncio

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        lost, self.on_lost = self.on_lost, None
        if lost is not None:
            lost()

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        writable, self._writable = self._writable, None
        if writable is not None:
            writable()

    def when_writable(self, call: Callable[[], None]) -> None:
        self._writable = call

    # httptools

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        request = Request(method, self._target, self._headers, b"".join(self._body))
        self._keep = self._parser.should_keep_alive()
        self._reset()
        self._waiting.append(request)
        if not self._busy:
            self._take()

    def _take(self) -> None:
        self._busy = True
        self._handler.handle(self, self._waiting.popleft())

    # answers

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        kind = b"content-type: %b\r\n" % content_type if body else b""
        head = b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\n\r\n" % (
            status,
            REASONS.get(status, b"Status"),
            kind,
            len(body),
        )
        self.transport.write(head + body)
        self._done()

    def start_stream(self) -> None:
        self.transport.write(EVENT_STREAM)

    def send(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.transport.write(b"0\r\n\r\n")
        self._done()

    def abort(self) -> None:
        """Closes the connection without another byte."""
        self.on_lost = None
        self.transport.abort()

    def _done(self) -> None:
        self.on_lost = None
        self._busy = False
        if not self._keep:
            self.transport.close()
        elif self._waiting:
            self._take()
