"""One timer for all that is waited for with the same deadline.

A timer for each record would cost more than encoding the record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Deadlines:
    """Futures that are to end within ``after_s`` of ``watch``; one that does not gets the error that ``late`` makes."""

    def __init__(self, after_s: float, late: Callable[[str], Exception]) -> None:
        self._after_s = after_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._watched: deque[tuple[float, asyncio.Future[Any], str]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, future: asyncio.Future[Any], doing: str) -> None:
        """``doing`` is for the error's text."""
        watched = self._watched
        while watched and watched[0][1].done():
            watched.popleft()
        at = self._loop.time() + self._after_s
        watched.append((at, future, doing))
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now, watched = self._loop.time(), self._watched
        while watched and (watched[0][1].done() or watched[0][0] <= now):
            _, future, doing = watched.popleft()
            if not future.done():
                future.set_exception(self._late(doing))
        self._timer = self._loop.call_at(watched[0][0], self._look) if watched else None
