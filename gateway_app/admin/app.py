"""Builds the admin app. Its lifespan opens the store, the producer and the recorder, and closes them in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response, Router, get
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig

from consumers.recorder import record
from gateway_app.admin.access import check_binding, guard
from gateway_app.admin.routes import RecordRoutes, SessionRoutes, TaskRoutes, TopicRoutes
from gateway_app.admin.task_intake import TaskIntake
from gateway_app.admin.task_schema import add_parts
from polar.settings import Settings
from polar.store import Store, StoreError
from streams.admin import create_topics
from streams.errors import StreamError
from streams.producer import Producer

SOURCE = "polar-admin"
MOST_BYTES = 64 * 1024 * 1024
OnFailure = Callable[[Exception], None]


@get("/health", summary="200 while the recorder runs", tags=["health"])
async def health(state: State) -> Response[dict[str, str]]:
    recorder: asyncio.Task[None] = state.recorder
    if recorder.done():
        return Response({"status": "the recorder has stopped: see the log"}, status_code=503)
    return Response({"status": "ok"})


def create_app(settings: Settings, on_failure: OnFailure = lambda error: None) -> Litestar:
    """``on_failure`` is told when it cannot start, or the recorder dies: the process should end, and start again.

    Raises SettingsError for an address beyond loopback without a key. Starting it raises StoreError when the DuckDB
    file cannot be opened, and StreamError.
    """
    check_binding(settings)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        try:
            async with _opened(app, settings, on_failure):
                yield
        except (StoreError, StreamError) as error:
            on_failure(error)
            raise

    admin = Router(
        "/admin",
        route_handlers=[TaskRoutes, SessionRoutes, RecordRoutes, TopicRoutes],
        guards=[guard(settings.admin_key)],
    )
    app = Litestar(
        [health, admin],
        lifespan=[lifespan],
        exception_handlers={StreamError: _unavailable, StoreError: _unavailable},
        openapi_config=OpenAPIConfig(title="Polar admin API", version="1.0"),
        request_max_body_size=MOST_BYTES,
        logging_config=None,
    )
    add_parts(app.openapi_schema)
    return app


@asynccontextmanager
async def _opened(app: Litestar, settings: Settings, on_failure: OnFailure) -> AsyncIterator[None]:
    store = Store(settings.run_dir / "polar.duckdb")
    try:
        await create_topics(settings.kafka_bootstrap)
        async with Producer(settings.kafka_bootstrap, source=SOURCE) as producer:
            intake = TaskIntake(producer)
            await intake.catch_up(settings.kafka_bootstrap, SOURCE)
            app.state.update({"settings": settings, "store": store, "intake": intake})
            async with _recorder(app, store, settings.kafka_bootstrap, on_failure):
                yield
    finally:
        store.close()


@asynccontextmanager
async def _recorder(app: Litestar, store: Store, bootstrap: str, on_failure: OnFailure) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(record(store, bootstrap, stop), name="recorder")

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            on_failure(error)

    task.add_done_callback(ended)
    app.state.recorder = task
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait([task], timeout=10.0)
        task.cancel()


def _unavailable(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    return Response({"status_code": 503, "detail": str(error)}, status_code=503)
