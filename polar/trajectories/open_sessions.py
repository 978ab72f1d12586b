"""The sessions that have no verdict yet: what the assembler holds, as a pure state machine.

Invariants: an attempt that was closed gets exactly one verdict, as soon as its story is complete or ``grace_s`` after
its end was read; the position of a partition is never beyond the first event of a session without a verdict, so reading
again from there, with nothing else remembered, gives the same verdicts.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from polar.trajectories.assembly import Assembly, assemble, unusable
from polar.trajectories.fates import Fates
from polar.trajectories.story import Story
from schemas.sessions import SessionOpened, SessionRecord

MAX_SESSION_BYTES = 128 * 2**20
"""Of packed token arrays in one session's story; a larger session is not trained."""


class OpenSession(msgspec.Struct):
    """A story, where its first event stands, and the time (seconds, any clock) at which its end was read."""

    story: Story
    partition: int
    first_offset: int
    closed_s: float | None = None


class OpenSessions:
    """The sessions of this member's partitions. ``now_s`` is any clock that never goes back."""

    def __init__(self, fates: Fates, grace_s: float, max_session_bytes: int = MAX_SESSION_BYTES) -> None:
        self._fates = fates
        self._grace_s = grace_s
        self._max_session_bytes = max_session_bytes
        self._open: dict[str, OpenSession] = {}
        self._next: dict[int, int] = {}
        self._touched: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, partition: int, offset: int, record: SessionRecord, now_s: float) -> None:
        """Folds in one event. One of an attempt that has its verdict, or that was never opened, changes nothing:
        within a partition the opening stands first.
        """
        self._next[partition] = offset + 1
        session_id, attempt = record.session_id, record.attempt
        if self._fates.assembled(session_id, attempt):
            return
        known = self._open.get(session_id)
        if known is None or known.story.attempt < attempt:
            if not isinstance(record, SessionOpened):
                return
            known = self._open[session_id] = OpenSession(Story(session_id, attempt), partition, offset)
        known.story.add(record)
        self._touched.add(session_id)
        if known.closed_s is None and known.story.closed is not None:
            known.closed_s = now_s

    def ready(self, now_s: float, limit: int = 64) -> list[Assembly]:
        """Verdicts (and traces) of at most ``limit`` sessions that wait for nothing more. ``settle`` them once they
        are written. Forgets sessions that nobody will close any more.
        """
        for session_id, known in list(self._open.items()):
            if known.closed_s is None and self._fates.lost(session_id, known.story.attempt):
                del self._open[session_id]
        waiting = [
            known.story
            for session_id, known in self._open.items()
            if session_id in self._touched or (known.closed_s is not None and now_s - known.closed_s >= self._grace_s)
        ]
        self._touched.clear()
        verdicts: list[Assembly] = []
        for story in waiting:
            if len(verdicts) == limit:
                self._touched.add(story.session_id)
            elif (verdict := self._verdict(story, now_s)) is not None:
                verdicts.append(verdict)
        return verdicts

    def settle(self, verdicts: Collection[Assembly]) -> None:
        """These have been written: their sessions are let go."""
        for assembly in verdicts:
            verdict = assembly.verdict
            self._fates.mark_assembled(verdict.session_id, verdict.attempt)
            known = self._open.get(verdict.session_id)
            if known is not None and known.story.attempt <= verdict.attempt:
                del self._open[verdict.session_id]

    def positions(self, settling: Collection[Assembly] = ()) -> dict[int, int]:
        """For each partition the next offset that must be read again after a crash, once ``settling`` are written."""
        positions = dict(self._next)
        written = {(a.verdict.session_id, a.verdict.attempt) for a in settling}
        for session_id, known in self._open.items():
            if (session_id, known.story.attempt) not in written:
                positions[known.partition] = min(positions[known.partition], known.first_offset)
        return positions

    def drop(self, partitions: Collection[int]) -> None:
        """Forgets all of these partitions: another member reads them now, or this one does so again."""
        self._open = {key: known for key, known in self._open.items() if known.partition not in partitions}
        self._next = {partition: offset for partition, offset in self._next.items() if partition not in partitions}
        self._touched &= self._open.keys()

    def _verdict(self, story: Story, now_s: float) -> Assembly | None:
        if story.packed_bytes > self._max_session_bytes:
            return unusable(story, f"its tokens take more than {self._max_session_bytes} bytes", infrastructure=False)
        known = self._open[story.session_id]
        if known.closed_s is None:
            return None
        if story.complete or now_s - known.closed_s >= self._grace_s:
            return assemble(story)
        return None
