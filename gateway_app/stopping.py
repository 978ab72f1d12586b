"""What ends a call before its time: its clients have left, its attempt has ended, or the engine has stalled."""

from __future__ import annotations

import asyncio

from gateway_app.failures import Failure


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


def client_left() -> Failure:
    return Failure("client_left", "the client has left", 499)


def stalled(seconds: float) -> Failure:
    return Failure(
        "engine_unavailable", f"the engine has sampled nothing for {seconds:.0f} s", 503, infrastructure=True
    )
