"""What each attempt of a session has used of its budget, and how many of its calls run. Pure; of one event loop.

- ``with budgets.admit(…) as use`` counts one running call, exactly until it is left, however it is left.
- A call is spent by ``use.started()``: a request that never became a call uses nothing up. While it may still become
  one it holds its place, so calls side by side never exceed the limit together.
- Tokens are spent when they were sampled. A call in flight may go over the limit; the next one is refused. Who wants to
  keep it from that samples at most ``use.tokens_left``.
- After a restart ``resume`` sets the calls to the next call number on the log, which counts the same thing: calls that
  were started. Sampled tokens are then counted from 0 again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from schemas.tasks import Budget

REMEMBERED = 200_000
"""Attempts that used something and of whose end the log says nothing; those with a running call stay."""


class OverBudget(Exception):
    """``status`` and ``code`` as the client sees them: 429 may be tried again, 403 may not."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Spent:
    """Of one attempt. ``calls`` includes those that hold their place."""

    __slots__ = ("calls", "running", "tokens")

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.tokens = 0
        self.running = 0


class Use:
    """One admitted call. Leaving it, once or more often, gives its place back once."""

    __slots__ = ("_budget", "_open", "_spent", "_started")

    def __init__(self, spent: Spent, budget: Budget) -> None:
        self._spent = spent
        self._budget = budget
        self._open = True
        self._started = False

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open = False
            self._spent.running -= 1
            self._spent.calls -= not self._started

    def started(self) -> None:
        """The call has its number: it is spent, whatever becomes of it."""
        self._started = True

    def sampled(self, tokens: int) -> None:
        """``tokens`` more were sampled, delivered or not."""
        self._spent.tokens += tokens

    @property
    def tokens_left(self) -> int | None:
        """How many may still be sampled; None: no limit."""
        limit = self._budget.tokens
        return None if limit is None else max(0, limit - self._spent.tokens)


class Budgets:
    """Of the attempts that called and have not ended."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._attempts: OrderedDict[tuple[str, int], Spent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._attempts)

    def admit(self, session_id: str, attempt: int, budget: Budget) -> Use:
        """To be entered at once. Raises OverBudget."""
        key = (session_id, attempt)
        spent = self._attempts.get(key)
        if spent is None:
            spent = self._attempts[key] = Spent()
            self._forget()
        else:
            self._attempts.move_to_end(key)
        _check(spent, budget)
        spent.running += 1
        spent.calls += 1
        return Use(spent, budget)

    def resume(self, numbers: Mapping[tuple[str, int], int]) -> None:
        """``numbers``: the next call number of each (session, attempt), before the first call is admitted."""
        for key, number in numbers.items():
            self._attempts[key] = Spent(number)
        self._forget()

    def drop(self, session_id: str, attempt: int) -> None:
        """Forgets this attempt, which has ended, and the lower ones. Their running calls may still be left."""
        for number in range(attempt + 1):
            self._attempts.pop((session_id, number), None)

    def _forget(self) -> None:
        """The attempts that called longest ago, but for those with a running call."""
        for _ in range(len(self._attempts) - self._remembered):
            key, spent = self._attempts.popitem(last=False)
            if spent.running:
                self._attempts[key] = spent


def _check(spent: Spent, budget: Budget) -> None:
    if spent.running >= budget.concurrent_calls:
        running = f"this session has {spent.running} calls running, and may have {budget.concurrent_calls}"
        raise OverBudget(429, "too_many_calls", f"{running}: wait for one to end")
    if budget.tokens is not None and spent.tokens >= budget.tokens:
        raise OverBudget(403, "budget_spent", f"this session has sampled its budget of {budget.tokens} tokens")
    if budget.calls is None or spent.calls < budget.calls:
        return
    raise OverBudget(403, "budget_spent", f"this session has made its budget of {budget.calls} calls")
