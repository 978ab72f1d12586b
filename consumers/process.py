"""How a consumer's process begins and ends: settings, log, signals, the line that says it is ready, exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from polar.settings import Settings, SettingsError, from_environment
from polar.supervisor import READY
from streams.errors import StreamError

Service = Callable[[Settings, asyncio.Event], Awaitable[None]]
"""Calls ``say_ready`` when its start-up checks are over; runs until the event is set, then ends cleanly."""


def say_ready() -> None:
    """One line of its own on stderr. An end before it is a refusal, after it a crash."""
    sys.stderr.write(f"{READY}\n")
    sys.stderr.flush()


def run_process(name: str, service: Service, refusals: tuple[type[Exception], ...] = ()) -> int:
    """Runs ``service`` until SIGTERM or SIGINT and returns the exit code: 0, or 1 with one line on stderr.

    1 stands for a mistake in the settings, for Kafka being away, for a newer process that has taken over, and for
    ``refusals``, also as the first of an exception group.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    expected: tuple[type[Exception], ...] = (SettingsError, StreamError, ExceptionGroup, *refusals)
    try:
        asyncio.run(_until_signalled(service, from_environment()))
    except expected as error:
        first = _first(error)
        if not isinstance(first, expected):
            raise
        print(f"{name}: {first}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(service: Service, settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await service(settings, stop)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
