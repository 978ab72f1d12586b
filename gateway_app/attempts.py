"""Which attempts of which sessions may still make model calls: a fold over ``polar.scheduler``.

An attempt has ended when its process tree is gone, when it was cancelled, when its node was lost or started anew, or
when a higher attempt exists. Its calls in flight are stopped, and new ones refused. A session that the log has not
named yet is let in: its token is signed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from gateway_app.failures import session_ended
from gateway_app.stopping import Stop
from schemas.record import Record
from schemas.scheduling import (
    Cancel,
    NodeLost,
    NodeRegistered,
    Prewarm,
    Run,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
    SlotRecord,
)

REMEMBERED = 200_000
"""Ended sessions; by the time that so many have followed, a token has long expired."""


class Place(msgspec.Struct, frozen=True):
    """Where the live attempt of a session is."""

    attempt: int
    node_id: str
    incarnation: str


class Attempts:
    """``evolve`` takes each record once, in order; reading the log again from the beginning changes nothing.

    ``on_end`` is told (session, attempt) when that attempt, and so each lower one, has ended.
    """

    def __init__(self, on_end: Callable[[str, int], None] = lambda session_id, attempt: None) -> None:
        self.on_end = on_end
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._live: dict[str, Place] = {}
        self._stops: dict[tuple[str, int], set[Stop]] = {}

    def ended(self, session_id: str, attempt: int) -> bool:
        return attempt <= self._ended.get(session_id, -1)

    def live(self) -> dict[str, int]:
        """The current attempt of each session that has one."""
        return {session_id: place.attempt for session_id, place in self._live.items()}

    @contextmanager
    def stopping(self, session_id: str, attempt: int, stop: Stop) -> Iterator[None]:
        """While inside, the end of the attempt sets ``stop``."""
        stops = self._stops.setdefault((session_id, attempt), set())
        stops.add(stop)
        if self.ended(session_id, attempt):
            stop.set(session_ended())
        try:
            yield
        finally:
            stops.discard(stop)
            if not stops:
                self._stops.pop((session_id, attempt), None)

    def evolve(self, record: Record) -> None:
        match record:
            case Prewarm() | Run() | SessionReady() | SessionRunning():
                self._seen(record)
            case SessionExited() | SessionFinished() | Cancel():
                self._end(record.session_id, record.attempt)
            case NodeLost():
                self._end_all(record.node_id, record.incarnation, same=True)
            case NodeRegistered():
                self._end_all(record.node_id, record.incarnation, same=False)

    def _seen(self, record: SlotRecord) -> None:
        if self.ended(record.session_id, record.attempt):
            return
        self._end(record.session_id, record.attempt - 1)
        self._live[record.session_id] = Place(record.attempt, record.node_id, record.incarnation)

    def _end_all(self, node_id: str, incarnation: str, *, same: bool) -> None:
        gone = [
            (session_id, place.attempt)
            for session_id, place in self._live.items()
            if place.node_id == node_id and (place.incarnation == incarnation) is same
        ]
        for session_id, attempt in gone:
            self._end(session_id, attempt)

    def _end(self, session_id: str, attempt: int) -> None:
        if attempt < 0 or self.ended(session_id, attempt):
            return
        self._ended[session_id] = attempt
        self._ended.move_to_end(session_id)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        place = self._live.get(session_id)
        if place is not None and place.attempt <= attempt:
            del self._live[session_id]
        for (stopped_id, stopped_attempt), stops in self._stops.items():
            if stopped_id == session_id and stopped_attempt <= attempt:
                for stop in stops:
                    stop.set(session_ended())
        self.on_end(session_id, attempt)
