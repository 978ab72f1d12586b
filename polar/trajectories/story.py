"""The story of one session: a fold over its events, in any order and with duplicates.

Only the highest attempt counts: its first event makes every lower attempt void, and events of a lower one are ignored.
Folding the same events in another order, or some of them again, gives an equal story.
Traces are made of ids, so of a call's messages and tools nothing is kept.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from schemas.record import Record
from schemas.sessions import (
    CallCompleted,
    CallDelivery,
    CallFailed,
    CallStarted,
    HarnessExited,
    SessionClosed,
    SessionOpened,
    SessionRecord,
    SessionScored,
)

R = TypeVar("R", bound=Record)


class CallStory(msgspec.Struct):
    """What is known of one call."""

    started: CallStarted | None = None
    completed: CallCompleted | None = None
    delivery: CallDelivery | None = None
    failed: CallFailed | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will be said of it: it failed, or it completed and its delivery is known."""
        return self.failed is not None or (self.completed is not None and self.delivery is not None)

    @property
    def lost(self) -> bool:
        """Started, and then neither completed nor failed: whoever served it is gone."""
        return self.completed is None and self.failed is None


class Story(msgspec.Struct):
    """The highest attempt of one session, as far as it is known."""

    session_id: str
    attempt: int = 0
    opened: SessionOpened | None = None
    exited: HarnessExited | None = None
    scored: SessionScored | None = None
    closed: SessionClosed | None = None
    calls: dict[str, CallStory] = {}
    packed_bytes: int = 0
    """Size of the token arrays that it holds."""

    def add(self, record: SessionRecord) -> None:
        """Folds one event in. Raises ValueError for an event of another session."""
        if record.session_id != self.session_id:
            raise ValueError(f"an event of session {record.session_id} in the story of {self.session_id}")
        if record.attempt < self.attempt:
            return
        if record.attempt > self.attempt:
            self._restart(record.attempt)
        match record:
            case SessionOpened():
                self.opened = _settle(self.opened, record)
            case HarnessExited():
                self.exited = _settle(self.exited, record)
            case SessionScored():
                self.scored = _settle(self.scored, record)
            case SessionClosed():
                self.closed = _settle(self.closed, record)
            case _:
                self._add_call(record)

    def _restart(self, attempt: int) -> None:
        self.attempt, self.packed_bytes, self.calls = attempt, 0, {}
        self.opened = self.exited = self.scored = self.closed = None

    def _add_call(self, record: CallStarted | CallCompleted | CallDelivery | CallFailed) -> None:
        call = self.calls.setdefault(record.call_id, CallStory())
        match record:
            case CallStarted():
                record = msgspec.structs.replace(record, messages=[], tools=None)
                if call.started is None:
                    self.packed_bytes += len(record.prompt_ids or b"")
                call.started = _settle(call.started, record)
            case CallCompleted():
                record = msgspec.structs.replace(record, message={}, usage={})
                if call.completed is None:
                    self.packed_bytes += len(record.response_ids) + len(record.logprobs) + len(record.prompt_ids or b"")
                call.completed = _settle(call.completed, record)
            case CallDelivery():
                call.delivery = _settle_delivery(call.delivery, record)
            case CallFailed():
                call.failed = _settle(call.failed, record)

    @property
    def complete(self) -> bool:
        """The node has closed the session, and every call that started has its end."""
        return self.opened is not None and self.closed is not None and all(c.ended for c in self.calls.values())

    def in_order(self) -> list[CallStory]:
        """The calls that are known to have started, by number (then by id)."""
        started = [call for call in self.calls.values() if call.started is not None]
        return sorted(started, key=_order)


def _order(call: CallStory) -> tuple[int, str]:
    assert call.started is not None
    return call.started.number, call.started.call_id


def _settle(known: R | None, told: R) -> R:
    """One of two accounts of the same event, whichever came first."""
    if known is None or known == told:
        return told
    return min(known, told, key=msgspec.json.encode)


def _settle_delivery(known: CallDelivery | None, told: CallDelivery) -> CallDelivery:
    """Where accounts differ, the call was delivered: a program that asked again was given the same sample."""
    if known is None or known.delivered == told.delivered:
        return _settle(known, told)
    return known if known.delivered else told
