"""Runs an ASGI app under uvicorn until SIGTERM or SIGINT, then stops it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Any

import uvicorn

GRACE_S = 5
TICK_S = 1.0


class ListenError(OSError):
    """The address cannot be listened at. One line: where, why, what to do."""


class _Server(uvicorn.Server):
    """Leaves the signals to ``serve``: uvicorn would raise them again at the end, and the exit code would not be 0.

    Wakes up once a second for its Date header, and at once for ``stop``.
    """

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    async def main_loop(self) -> None:
        while not self._stop.is_set() and not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def listen(host: str, port: int) -> socket.socket:
    """Raises ListenError."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ListenError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port") from None


async def serve(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serves until ``stop`` is set; requests that run then have GRACE_S seconds to end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )
    await _Server(config, stop).serve(sockets=[listening])


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, in the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
