"""Calls without Kafka and without a model: a log in memory, and an engine that is away where a test says so."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from gateway_app.call import About, Call
from gateway_app.dialects.chat_completions import OpenAIChat
from gateway_app.history import AttemptHistory
from gateway_app.sampling.sampler import Sampler
from gateway_app.stopping import Stop
from polar.engine.client import EngineClient
from polar.session_token import SessionToken, sign, verify
from schemas.record import Record

SECRET = "a secret of thirty-two characters"


class Log:
    """In Kafka's place: keeps what is sent."""

    flowing = True

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def post(self, _: str, record: Record) -> asyncio.Future[Any]:
        self.records.append(record)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

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
        if name == "models":
            return web.json_response({"data": [{"id": "policy", "max_model_len": 1000}]})
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


@functools.cache
def token() -> SessionToken:
    return verify(SECRET, sign(SECRET, "s", 0, 60))


def sampler(engine: EngineClient, hold_s: float = 30.0) -> Sampler:
    return Sampler(engine, policy="policy", api="tokens", history="template", hold_s=hold_s)


def call(log: Log, engine: Sampler, messages: list[Any], stop: Stop, history: AttemptHistory | None = None) -> Call:
    """A call of the session that ``token`` is for."""
    request = OpenAIChat().parse(msgspec.json.encode({"model": "m", "messages": messages}))
    about = About(token=token(), dialect="openai.chat", secret=True)
    return Call(
        log,
        about,
        history=history or AttemptHistory(),
        request=request,
        chat_request=engine.chat_request(request),
        stop=stop,
    )
