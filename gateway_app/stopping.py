"""What ends a call before its time: its clients have left, its attempt has ended, or the engine has stalled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gateway_app.failures import Failure

T = TypeVar("T")


class Stop:
    """Set once; the first reason stays."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.why: Failure | None = None

    def set(self, why: Failure) -> None:
        if self.why is None:
            self.why = why
            self._event.set()

    @property
    def is_set(self) -> bool:
        return self.why is not None

    async def wait(self) -> None:
        await self._event.wait()

    async def within(self, seconds: float) -> bool:
        """Whether it was set before ``seconds`` had passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


async def unless_stopped(work: Awaitable[T], stop: Stop) -> T:
    """The result of ``work``, which is cancelled when ``stop`` is set. Raises why it was set."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and stop.why is not None:
            raise stop.why
        return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def client_left() -> Failure:
    return Failure("client_left", "the client has left", 499)


def stalled(seconds: float) -> Failure:
    return Failure(
        "engine_unavailable", f"the engine has sampled nothing for {seconds:.0f} s", 503, infrastructure=True
    )
