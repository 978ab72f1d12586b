"""Which session of a node is in which stage: a pure state machine that owns no clock, task or socket.

INIT → READY → RUNNING → POSTRUN, each with its slots; a session waits in line where a stage is full. Invariants:

* a stage never holds more sessions than it has slots;
* what is answered to each ``Prewarm`` is exactly one ``finish``, in whatever stage it was cancelled or failed;
* a command for an attempt that is known, was finished or is superseded changes nothing;
* no agent starts while as many sessions as there are run slots wait for POSTRUN, so their number has a limit too.

The caller carries out the actions and tells what came of them: ``prepared``, ``exited``, ``scored``, ``finished``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

from schemas.sessions import Outcome

Key = tuple[str, int]
"""Session id and attempt."""
Slot = Literal["init", "ready", "run", "postrun"]
Stage = Literal[
    "init_queued", "init", "ready_queued", "ready", "run_queued", "run", "postrun_queued", "postrun", "ending"
]
Verb = Literal["prepare", "announce", "launch", "score", "stop", "finish"]

REMEMBERED = 10_000
"""Finished attempts whose commands are still known to be old; a scheduler repeats none from so long ago."""

NEXT: dict[Stage, tuple[Stage, Verb]] = {
    "init_queued": ("init", "prepare"),
    "ready_queued": ("ready", "announce"),
    "run_queued": ("run", "launch"),
    "postrun_queued": ("postrun", "score"),
}
OCCUPIES: dict[Stage, Slot] = {
    "init": "init",
    "ready_queued": "init",
    "ready": "ready",
    "run_queued": "ready",
    "run": "run",
    "postrun": "postrun",
}
"""A session in line for the next stage keeps the slot of its last one, but for POSTRUN: the agent's slot is free."""


class Action(msgspec.Struct, frozen=True):
    """``stop`` asks for the end of what the session's stage is doing; the stage then reports as it always does."""

    verb: Verb
    key: Key
    outcome: Outcome = "completed"
    reason: str = ""


class _Held(msgspec.Struct):
    stage: Stage
    cancelled: str | None = None
    timed_out: bool = False


class NodeSessions:
    """The sessions of one node, from their ``Prewarm`` to their ``finish``."""

    def __init__(self, slots: dict[Slot, int]) -> None:
        self._slots = slots
        self._held: dict[Key, _Held] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._draining = False

    def counts(self) -> dict[Slot, int]:
        """Sessions by the slot that they occupy."""
        counts: dict[Slot, int] = dict.fromkeys(self._slots, 0)
        for held in self._held.values():
            if held.stage in OCCUPIES:
                counts[OCCUPIES[held.stage]] += 1
        return counts

    def admits(self, key: Key) -> bool:
        """Whether a ``prewarm`` of this attempt would be new."""
        newest = max((attempt for session, attempt in self._held if session == key[0]), default=-1)
        return not self._draining and key[1] > max(newest, self._finished.get(key[0], -1))

    def prewarm(self, key: Key) -> list[Action]:
        if not self.admits(key):
            return []
        self._held[key] = _Held(stage="init_queued")
        return self._fill()

    def run(self, key: Key) -> list[Action]:
        held = self._held.get(key)
        if held is None or held.stage != "ready":
            return []
        held.stage = "run_queued"
        return self._fill()

    def cancel(self, key: Key, reason: str) -> list[Action]:
        held = self._held.get(key)
        if held is None or held.stage == "ending" or held.cancelled is not None:
            return []
        held.cancelled = reason
        if held.stage in ("init", "run", "postrun"):
            return [Action("stop", key)]
        return self._finish(key, "cancelled", reason)

    def drain(self) -> None:
        """Takes no further sessions; those that are here go on."""
        self._draining = True

    def prepared(self, key: Key, fault: str | None = None) -> list[Action]:
        """INIT is over."""
        held = self._held[key]
        if fault is None and held.cancelled is None:
            held.stage = "ready_queued"
            return self._fill()
        return self._over(key, "infrastructure", fault or "")

    def exited(self, key: Key, *, timed_out: bool = False, fault: str | None = None) -> list[Action]:
        """The agent's processes are gone."""
        held = self._held[key]
        if fault is None and held.cancelled is None:
            held.stage, held.timed_out = "postrun_queued", timed_out
            return self._fill()
        return self._over(key, "infrastructure", fault or "")

    def scored(self, key: Key) -> list[Action]:
        return self._over(key, "agent_timeout" if self._held[key].timed_out else "completed", "")

    def finished(self, key: Key) -> None:
        """The last report is out and the folder is gone."""
        del self._held[key]
        self._finished[key[0]] = max(key[1], self._finished.pop(key[0], -1))
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def _over(self, key: Key, outcome: Outcome, reason: str) -> list[Action]:
        cancelled = self._held[key].cancelled
        return self._finish(key, outcome, reason) if cancelled is None else self._finish(key, "cancelled", cancelled)

    def _finish(self, key: Key, outcome: Outcome, reason: str) -> list[Action]:
        self._held[key].stage = "ending"
        return [Action("finish", key, outcome, reason), *self._fill()]

    def _fill(self) -> list[Action]:
        """Moves those who wait in line, oldest first, into slots that are free; one move may free the next slot."""
        actions: list[Action] = []
        moved = True
        while moved:
            moved = False
            for key, held in self._held.items():
                if held.stage in NEXT and self._room(NEXT[held.stage][0]):
                    held.stage, verb = NEXT[held.stage]
                    actions.append(Action(verb, key))
                    moved = True
        return actions

    def _room(self, stage: Stage) -> bool:
        slot = OCCUPIES[stage]
        if stage == "run" and sum(h.stage == "postrun_queued" for h in self._held.values()) >= self._slots["run"]:
            return False
        return self.counts()[slot] < self._slots[slot]
