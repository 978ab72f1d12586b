"""What ``polar.scheduler`` says of attempts: which have their verdict already, and which will never be closed.

An attempt is lost when its node was declared lost, or came back as another incarnation, before it reported that it is
done with the attempt: the end of the story stands on ``polar.sessions`` before that report is written.
Memory: one entry per session that has a verdict, and one per session that runs.
"""

from __future__ import annotations

from schemas.scheduling import NodeLost, NodeRegistered, Run, SchedulerRecord, SessionAssembled, SessionFinished

FOLLOWED = frozenset({"command.run", "node.registered", "node.lost", "report.finished", "report.assembled"})
"""The record types that ``Fates`` looks at."""


class Fates:
    """A fold over ``polar.scheduler``."""

    def __init__(self) -> None:
        self._assembled: dict[str, int] = {}
        self._runs: dict[str, tuple[int, str, str]] = {}
        self._alive: dict[str, str] = {}

    def add(self, record: SchedulerRecord) -> None:
        """Folds one record in; those of other types change nothing."""
        match record:
            case SessionAssembled():
                self.mark_assembled(record.session_id, record.attempt)
            case Run():
                self._runs[record.session_id] = (record.attempt, record.node_id, record.incarnation)
            case SessionFinished():
                self._forget_run(record.session_id, record.attempt)
            case NodeRegistered():
                self._alive[record.node_id] = record.incarnation
            case NodeLost():
                if self._alive.get(record.node_id) == record.incarnation:
                    del self._alive[record.node_id]

    def mark_assembled(self, session_id: str, attempt: int) -> None:
        """This attempt has its verdict."""
        self._assembled[session_id] = max(attempt, self._assembled.get(session_id, attempt))
        self._forget_run(session_id, attempt)

    def assembled(self, session_id: str, attempt: int) -> bool:
        """Whether this attempt, or a higher one, has its verdict."""
        return attempt <= self._assembled.get(session_id, -1)

    def lost(self, session_id: str, attempt: int) -> bool:
        """Whether nobody is left who could close this attempt. False for one that is done, or not known here."""
        if session_id not in self._runs:
            return False
        running, node_id, incarnation = self._runs[session_id]
        return attempt < running or (attempt == running and self._alive.get(node_id) != incarnation)

    def _forget_run(self, session_id: str, attempt: int) -> None:
        if session_id in self._runs and self._runs[session_id][0] <= attempt:
            del self._runs[session_id]
