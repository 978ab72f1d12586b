"""Capture without Kafka and without a model: a log in memory, and an engine that is away where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from polar.session_token import SessionToken, sign, verify
from schemas.record import Record

SECRET = "a secret of thirty-two characters"


class Log:
    """In the producer's place: keeps what is sent."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def send(self, _: str, record: Record) -> None:
        self.records.append(record)

    async def holds(self, kind: type) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(record, kind) for record in self.records):
                await asyncio.sleep(0.01)


class Engine:
    """Renders, and drops the connection of each request whose path ends with a name in ``away``."""

    def __init__(self, *away: str) -> None:
        self.away = set(away)
        self.asked = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if name in self.away:
            request.transport.close()
            self.asked.set()
        if name == "generate":
            self.asked.set()
            await asyncio.sleep(60)
        return web.json_response({"token_ids": [1, 2], "sampling_params": {}})

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def token() -> SessionToken:
    return verify(SECRET, sign(SECRET, "s", 0, 60))
