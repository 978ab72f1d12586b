"""Builds the admin app. Its lifespan opens the store, the producer and the recorder, and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from consumers.recorder import record
from litestar import Litestar, Request, Response, Router, get
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig
from polar.store import Store, StoreError

from gateway_app.admin.access import check_binding, guard
from gateway_app.admin.routes import RecordRoutes, SessionRoutes, TaskRoutes, TopicRoutes
from gateway_app.admin.task_intake import TaskIntake
from polar.settings import Settings
from streams.admin import create_topics
from streams.producer import KafkaUnavailable, Producer

SOURCE = "polar-admin"
log = logging.getLogger(__name__)


@get("/health", summary="200 while the recorder runs", tags=["health"])
async def health(state: State) -> Response[dict[str, str]]:
    recorder: asyncio.Task[None] = state.recorder
    if recorder.done():
        return Response({"status": "the recorder has stopped: see the log"}, status_code=503)
    return Response({"status": "ok"})


def create_app(settings: Settings, on_failure: Callable[[BaseException], None] = lambda error: None) -> Litestar:
    """``on_failure`` is told when the recorder dies: the process should end then, to be started again.

    Raises SettingsError for an address beyond loopback without a key. Starting it raises StoreError when the DuckDB
    file cannot be opened, and KafkaUnavailable.
    """
    check_binding(settings)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        await create_topics(settings.kafka_bootstrap)
        store = Store(settings.run_dir / "polar.duckdb")
        try:
            async with Producer(settings.kafka_bootstrap, source=SOURCE) as producer:
                intake = TaskIntake(producer)
                await intake.catch_up(settings.kafka_bootstrap, SOURCE)
                app.state.update({"settings": settings, "store": store, "intake": intake})
                async with _recorder(app, store, settings.kafka_bootstrap, on_failure):
                    yield
        finally:
            store.close()

    admin = Router(
        "/admin",
        route_handlers=[TaskRoutes, SessionRoutes, RecordRoutes, TopicRoutes],
        guards=[guard(settings.admin_key)],
    )
    return Litestar(
        [health, admin],
        lifespan=[lifespan],
        exception_handlers={KafkaUnavailable: _unavailable, StoreError: _unavailable},
        openapi_config=OpenAPIConfig(title="Polar admin API", version="1.0"),
        request_max_body_size=64 * 1024 * 1024,
    )


@asynccontextmanager
async def _recorder(
    app: Litestar, store: Store, bootstrap: str, on_failure: Callable[[BaseException], None]
) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(record(store, bootstrap, stop), name="recorder")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the recorder has died: %s", error)
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
