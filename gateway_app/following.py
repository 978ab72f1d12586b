"""What the gateway reads from Kafka: the scheduler's log, followed for ever, and the call numbers of live sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway_app.attempts import Attempts
from schemas.sessions import CallStarted
from streams.consumer import Reader
from streams.errors import KafkaUnavailable
from streams.topics import SCHEDULER, SESSIONS

logger = logging.getLogger(__name__)

OTHER_REPORTS = frozenset({"node.heartbeat"})

OTHER_EVENTS = frozenset(
    {
        "session.opened",
        "call.completed",
        "call.delivery",
        "call.failed",
        "session.exited",
        "session.scored",
        "session.closed",
    }
)


class Follower:
    """Keeps ``attempts`` up to date; an async context manager that has read the whole log when entered.

    ``on_failure`` is told what ended it early: ``attempts`` is out of date from then on, and the process should end.
    """

    def __init__(self, bootstrap: str, attempts: Attempts, on_failure: Callable[[Exception], None]) -> None:
        self._bootstrap = bootstrap
        self._attempts = attempts
        self._on_failure = on_failure
        self._positions: dict[tuple[str, int], int] = {}

    @property
    def alive(self) -> bool:
        return not self._following.done()

    async def __aenter__(self) -> Follower:
        async with self._reader() as reader:
            async for chunk in reader.chunks_to_end():
                for received in chunk:
                    self._attempts.evolve(received.record)
            self._positions = reader.positions()
        self._following = asyncio.create_task(self._follow())
        self._following.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        """Goes on where it was when Kafka has been away."""
        while True:
            try:
                async with self._reader() as reader:
                    while True:
                        for received in await reader.poll(1.0):
                            self._attempts.evolve(received.record)
                        self._positions = reader.positions()
            except KafkaUnavailable as error:
                logger.error("the scheduler's log is not followed at the moment: %s", error)
                await asyncio.sleep(1.0)

    def _reader(self) -> Reader:
        return Reader(self._bootstrap, [SCHEDULER], source="gateway", start=self._positions, skip_types=OTHER_REPORTS)

    def _ended(self, following: asyncio.Task[None]) -> None:
        error = None if following.cancelled() else following.exception()
        if isinstance(error, Exception):
            self._on_failure(error)


async def call_numbers(bootstrap: str, live: dict[str, int]) -> dict[tuple[str, int], int]:
    """The next call number of each live (session, attempt) that has called, after a restart of the gateway."""
    numbers: dict[tuple[str, int], int] = {}
    if not live:
        return numbers
    async with Reader(bootstrap, [SESSIONS], source="gateway", start="beginning", skip_types=OTHER_EVENTS) as reader:
        async for chunk in reader.chunks_to_end():
            for record in (received.record for received in chunk):
                if isinstance(record, CallStarted) and live.get(record.session_id) == record.attempt:
                    key = (record.session_id, record.attempt)
                    numbers[key] = max(numbers.get(key, 0), record.number + 1)
    return numbers
