"""Runs an ASGI app under uvicorn until SIGTERM or SIGINT, then stops it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Any

import uvicorn

GRACE_S = 5


class ListenError(OSError):
    """The address cannot be listened at. One line: where, why, what to do."""


class _Server(uvicorn.Server):
    """Leaves the signals to ``serve``: uvicorn would raise them again at the end, and the exit code would not be 0."""

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
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    await serving


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, in the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
