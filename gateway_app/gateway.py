"""``python -m gateway_app.gateway``: the model API that agent programs are pointed at, at ``/s/<session token>``.

Each call is sampled by the engine and captured on ``polar.sessions``. What may call is followed on ``polar.scheduler``,
which is read from its beginning before the first request is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop
from litestar import Litestar, Request, Response, asgi, get
from litestar.types import Receive, Scope, Send

from gateway_app.attempts import Attempts
from gateway_app.call import Log
from gateway_app.following import Follower, call_numbers
from gateway_app.log import KafkaLog, NoLog
from gateway_app.metrics import Metrics
from gateway_app.sampling.sampler import Sampler
from gateway_app.serve import ListenError, listen, serve, stop_on_signals
from gateway_app.serving import Serving
from polar.engine.client import EngineClient
from polar.session_token import load_secret
from polar.settings import Settings, SettingsError, from_environment
from streams.errors import StreamError
from streams.producer import Producer

log = logging.getLogger("gateway")

PUBLISH_S = 15.0


class Gateway:
    """What the routes share."""

    def __init__(self, serving: Serving, engine: EngineClient, follower: Follower) -> None:
        self.serving = serving
        self.engine = engine
        self.follower = follower


@get("/health")
async def health(request: Request[Any, Any, Any]) -> Response[Any]:
    """200 while it knows which attempts have ended; ``engine`` says whether the engine is alive, too."""
    gateway: Gateway = request.app.state.gateway
    if not gateway.follower.alive:
        return Response({"status": "the scheduler's log is no longer followed: see the log"}, status_code=503)
    return Response({"status": "ok", "engine": await gateway.engine.healthy()})


@get("/metrics")
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    content, media_type = request.app.state.gateway.serving.metrics.render()
    return Response(content, media_type=media_type)


@asgi("/", is_mount=True, copy_scope=True)
async def models_api(scope: Scope, receive: Receive, send: Send) -> None:
    """All else: paths are the dialects' business, and they are lenient."""
    await scope["litestar_app"].state.gateway.serving.handle(scope, receive, send)


def create_app(gateway: Gateway) -> Litestar:
    app = Litestar([health, metrics, models_api], openapi_config=None, logging_config=None)
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def gateway(
    settings: Settings, *, publish_s: float = PUBLISH_S, on_failure: Callable[[Exception], None] = lambda error: None
) -> AsyncIterator[Gateway]:
    """A gateway that is connected and has read who may call. Raises StreamError when Kafka is away.

    ``on_failure`` is told when it can no longer follow who may call: the process should end, and start again.
    """
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineClient(settings.engine_url))
        attempts, counts = Attempts(), Metrics()
        log: Log = NoLog()
        if settings.capture == "on":
            producer = Producer(settings.kafka_bootstrap, source="gateway", deadline_s=publish_s)
            log = KafkaLog(await stack.enter_async_context(producer), counts)
        sampler = Sampler(
            engine,
            policy=settings.policy,
            api=settings.engine_api,
            history=settings.history,
            hold_s=settings.engine_hold_s,
        )
        secret = load_secret(settings)
        serving = Serving(sampler, log, attempts, counts, secret=secret, stall_s=settings.engine_stall_s)
        follower = await stack.enter_async_context(Follower(settings.kafka_bootstrap, attempts, on_failure))
        serving.resume(await call_numbers(settings.kafka_bootstrap, attempts.live()))
        await stack.enter_async_context(_going_on(serving.answers.keep_alive()))
        yield Gateway(serving, engine, follower)


@asynccontextmanager
async def _going_on(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def run(settings: Settings) -> None:
    """Returns after SIGTERM or SIGINT. Raises ListenError, and StreamError when who may call is not known any more."""
    stop, failures = stop_on_signals(), list[Exception]()

    def failed(error: Exception) -> None:
        failures.append(error)
        stop.set()

    with listen(settings.gateway_host, settings.gateway_port) as listening:
        async with gateway(settings, on_failure=failed) as ready:
            gc.collect()
            gc.freeze()  # what lives as long as the process is not looked through again and again
            log.info("listening at %s:%d", settings.gateway_host, settings.gateway_port)
            await serve(create_app(ready), listening, stop)
    for error in failures:
        raise StreamError(f"the scheduler's log is no longer followed: {error}") from error


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="gateway: %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    try:
        uvloop.run(run(from_environment()))
    except (SettingsError, ListenError, StreamError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
