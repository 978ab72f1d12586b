"""How a consumer's process begins and ends: settings, log, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from polar.settings import Settings, SettingsError, from_environment
from streams.errors import StreamError

Service = Callable[[Settings, asyncio.Event], Awaitable[None]]
"""Runs until the event is set, then ends cleanly."""


def run_process(name: str, service: Service) -> int:
    """Runs ``service`` until SIGTERM or SIGINT and returns the exit code: 0, or 1 with one line on stderr.

    1 stands for a mistake in the settings, for Kafka being away, and for a newer process that has taken over.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    logging.getLogger("aiokafka").setLevel(logging.ERROR)
    try:
        asyncio.run(_until_signalled(service, from_environment()))
    except (SettingsError, StreamError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(service: Service, settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await service(settings, stop)
