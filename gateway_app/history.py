"""What each attempt has called so far: the base of a new call's event, the ids that its prompt goes on from, numbers.

The request of call n repeats the history of call n−1; without this the log would grow with the square of a session,
and a prompt could not keep the ids that were sampled. A turn holds what is new after its parent, so a session takes
the memory of its tokens once. What is kept has a limit; without it a gateway renders and writes the whole.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway_app.auxiliary import SeenAgent
from gateway_app.dialects.dialect import ModelRequest, Reply
from gateway_app.digests import Conversation, exact, extended

THREADS = 256
RECENT = 8
"""Candidates for a base where no history matches: enough for the branches that an agent goes back to."""
MAX_ATTEMPTS = 4096
MAX_IDS = 64_000_000
"""Of all attempts together: 256 MB. The attempts that called longest ago are forgotten first."""
MAX_ATTEMPT_IDS = 8_000_000
NUMBERS = 200_000
"""Of attempts without a history; one that ends without the log saying so leaves its number behind."""


class Turn(msgspec.Struct, eq=False):
    """A call that was served. Its ids are the first ``kept`` of its parent's, then ``tail``.

    ``root`` stands for its tools, ``messages`` are the exact digests of its request, then of its reply.
    """

    call_id: str
    parent: Turn | None
    kept: int
    tail: NDArray[np.int32]
    root: bytes
    messages: bytes
    ended_by_token: bool = False

    @property
    def length(self) -> int:
        return self.kept + len(self.tail)

    def ids(self) -> NDArray[np.int32]:
        parts: list[NDArray[np.int32]] = []
        turn, end = self, self.length
        while True:
            if turn.kept < end:
                parts.append(turn.tail[: end - turn.kept])
                end = turn.kept
            if turn.parent is None or end == 0:
                return np.concatenate(parts[::-1]) if parts else self.tail
            turn = turn.parent


class Base(msgspec.Struct, frozen=True):
    """How much of ``turn`` a new call repeats."""

    turn: Turn
    kept_ids: int
    kept_messages: int


class Match(msgspec.Struct, frozen=True):
    """The deepest turn whose request and reply are the first ``messages`` of a new request's history."""

    turn: Turn
    messages: int


class AttemptHistory:
    """``complete`` is False where earlier calls of the attempt are no longer in memory."""

    def __init__(self, next_number: int = 0) -> None:
        self._next_number = next_number
        self.complete = next_number == 0
        self.size = 0
        self.seen = SeenAgent()
        self._threads: OrderedDict[str, str] = OrderedDict()
        self._recent: deque[Turn] = deque(maxlen=RECENT)
        self._by_history: dict[bytes, Turn] = {}

    def take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def note(self, call_id: str, request: ModelRequest, thread_id: str | None, *, turn: bool) -> None:
        """A call of the attempt's agent, or of the sub-agent ``thread_id``; ``turn``: none of its side calls."""
        if turn:
            self.seen.see(request)
        if thread_id is not None:
            self._threads[thread_id] = call_id
            if len(self._threads) > THREADS:
                self._threads.popitem(last=False)

    def renamed(self, old: str, new: str) -> None:
        """A call that goes on under a new id."""
        self._threads.update({thread: new for thread, call_id in self._threads.items() if call_id == old})

    def last_call(self, thread_id: str) -> str | None:
        return self._threads.get(thread_id)

    def match(self, talk: Conversation) -> Match | None:
        for messages in range(len(talk.chain) - 1, 0, -1):
            if (turn := self._by_history.get(talk.chain[messages])) is not None:
                return Match(turn, messages)
        return None

    def base(self, talk: Conversation, ids: NDArray[np.int32], match: Match | None) -> Base | None:
        """The turn that shares the longest prefix of ids, the newest of equals; None if none shares any."""
        best: Base | None = None
        for turn in [*self._recent, *([match.turn] if match else [])]:
            kept = common_prefix(turn.ids(), ids)
            if kept and (best is None or kept >= best.kept_ids):
                best = Base(turn, kept, talk.equal_messages(turn.messages))
        return best

    def text_base(self, talk: Conversation, match: Match | None) -> Base | None:
        """As ``base``, for a call whose ids are not known yet: the turn that shares most messages."""
        turns = [*self._recent, *([match.turn] if match else [])]
        bases = [Base(turn, 0, talk.equal_messages(turn.messages)) for turn in turns]
        best = max(bases, key=lambda base: base.kept_messages, default=None)
        return best if best is not None and best.kept_messages else None

    def add(self, call_id: str, talk: Conversation, ids: NDArray[np.int32], base: Base | None) -> Turn:
        """A call whose prompt is ``ids``."""
        if self.size + len(ids) > MAX_ATTEMPT_IDS:
            self.forget()
            base = None
        kept = base.kept_ids if base else 0
        turn = Turn(call_id, base.turn if base and kept else None, kept, ids[kept:].copy(), talk.chain[0], talk.exact)
        self._recent.append(turn)
        self.size += _size(turn)
        return turn

    def extend(self, turn: Turn, talk: Conversation, reply: Reply, ids: Sequence[int], ended_by_token: bool) -> None:
        """``turn`` has its reply: a later request may go on from it."""
        message = reply.message()
        turn.tail = np.concatenate([turn.tail, np.array(ids, dtype=np.int32)])
        turn.ended_by_token = ended_by_token
        turn.messages += exact(message)
        self.size += len(ids)
        self._by_history[extended(talk.chain[-1], message)] = turn

    def discard(self, turn: Turn) -> None:
        """A call without a reply: what is written of it may not be on the log."""
        if turn in self._recent:
            self._recent.remove(turn)
        self.size = max(0, self.size - _size(turn))

    def forget(self) -> None:
        self._recent.clear()
        self._by_history.clear()
        self.size, self.complete = 0, False


class Histories:
    """Of the attempts that called last and have not ended; of the others only the next call number, if not 0."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, int], AttemptHistory] = OrderedDict()
        self._checked = 0

    def of(self, session_id: str, attempt: int) -> AttemptHistory:
        key = (session_id, attempt)
        if key not in self._attempts:
            self._attempts[key] = AttemptHistory(self._numbers.pop(key, 0))
        self._attempts.move_to_end(key)
        self._bound()
        return self._attempts[key]

    def resume(self, numbers: dict[tuple[str, int], int]) -> None:
        """``numbers``: the next call number of each (session, attempt)."""
        self._numbers.update(numbers)
        while len(self._numbers) > NUMBERS:
            self._numbers.popitem(last=False)

    def drop(self, session_id: str, attempt: int) -> None:
        """Forgets this attempt, which has ended, and the lower ones."""
        for key in [(session_id, number) for number in range(attempt + 1)]:
            self._attempts.pop(key, None)
            self._numbers.pop(key, None)

    def _bound(self) -> None:
        while len(self._attempts) > MAX_ATTEMPTS:
            self._evict()
        self._checked = (self._checked + 1) % 64
        if self._checked == 0:
            total = sum(history.size for history in self._attempts.values())
            while total > MAX_IDS and len(self._attempts) > 1:
                total -= self._evict()

    def _evict(self) -> int:
        old, history = self._attempts.popitem(last=False)
        self.resume({old: history.take_number()})
        return history.size


def _size(turn: Turn) -> int:
    """What it holds, in ids of four bytes."""
    return len(turn.tail) + len(turn.messages) // 4


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """The number of leading ids that are equal."""
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n
