"""The last calls of each attempt, so that ``call.started`` carries only what is new, and call numbers go on.

The request of call n repeats the history of call n−1; without this the log would grow with the square of a session.
A gateway that has no base in memory writes the whole.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

CALLS = 8
"""Candidates for a base: enough for the branches that an agent goes back to."""
ATTEMPTS = 1024
NUMBERS = 200_000
"""Of attempts without a history; one that ends without the log saying so leaves its number behind."""


class PastCall(msgspec.Struct):
    """``ids`` are those of the prompt, then, once it has completed, of the response; ``messages`` likewise."""

    call_id: str
    messages: list[Any]
    tools: list[Any]
    ids: NDArray[np.int32]

    def extend(self, message: dict[str, Any], response_ids: list[int]) -> None:
        self.messages = [*self.messages, message]
        self.ids = np.concatenate([self.ids, np.array(response_ids, dtype=np.int32)])


class Base(msgspec.Struct, frozen=True):
    """How much of ``call`` a new call repeats."""

    call: PastCall
    kept_ids: int
    kept_messages: int


class AttemptHistory:
    def __init__(self, next_number: int = 0) -> None:
        self._next_number = next_number
        self._calls: deque[PastCall] = deque(maxlen=CALLS)

    def take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def add(self, call: PastCall) -> None:
        self._calls.append(call)

    def base_of(self, messages: list[Any], ids: NDArray[np.int32]) -> Base | None:
        """The past call that shares the longest prefix of ids, the newest of equals; None if none shares any."""
        best: Base | None = None
        for call in self._calls:
            kept = common_prefix(call.ids, ids)
            if kept and (best is None or kept >= best.kept_ids):
                best = Base(call, kept, _equal_messages(call.messages, messages))
        return best


class Histories:
    """Of the attempts that called last and have not ended; of the others only the next call number, if not 0."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, int], AttemptHistory] = OrderedDict()

    def of(self, session_id: str, attempt: int) -> AttemptHistory:
        key = (session_id, attempt)
        if key not in self._attempts:
            self._attempts[key] = AttemptHistory(self._numbers.pop(key, 0))
        self._attempts.move_to_end(key)
        while len(self._attempts) > ATTEMPTS:
            old, history = self._attempts.popitem(last=False)
            self.resume({old: history.take_number()})
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


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """The number of leading ids that are equal."""
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n


def _equal_messages(a: list[Any], b: list[Any]) -> int:
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
