"""``polar.scheduler``: commands to nodes, and the reports that come back. Key: session_id, node_id or group_id.

Commands: prewarm, run, cancel, drain. Everything else is a report. ``incarnation`` is new each time that a node's
process starts, so a command to a process that is gone is void.
"""

from __future__ import annotations

from schemas.record import Record
from schemas.sessions import Outcome
from schemas.tasks import TaskSpec


class NodeRecord(Record, frozen=True, kw_only=True):
    node_id: str
    incarnation: str


class SlotRecord(NodeRecord, frozen=True, kw_only=True):
    """Concerns one attempt of one session on one node."""

    session_id: str
    attempt: int


class Prewarm(SlotRecord, frozen=True, kw_only=True, tag="command.prewarm"):
    """Prepare this session's sandbox, report ready, and hold it."""

    task: TaskSpec
    sample_index: int


class Run(SlotRecord, frozen=True, kw_only=True, tag="command.run"):
    """Start the agent in the READY sandbox."""


class Cancel(SlotRecord, frozen=True, kw_only=True, tag="command.cancel"):
    """End this session, in whatever stage it is."""

    reason: str


class Drain(NodeRecord, frozen=True, kw_only=True, tag="command.drain"):
    """Take no further sessions."""


class NodeRegistered(NodeRecord, frozen=True, kw_only=True, tag="node.registered"):
    """A node's process has started, with no sessions. Slots by stage."""

    init_slots: int
    ready_slots: int
    run_slots: int
    postrun_slots: int


class NodeHeartbeat(NodeRecord, frozen=True, kw_only=True, tag="node.heartbeat"):
    preparing: int = 0
    ready: int = 0
    running: int = 0
    postrun: int = 0


class NodeLost(NodeRecord, frozen=True, kw_only=True, tag="node.lost"):
    """Written by the scheduler when a lease has run out: that incarnation's sessions run again elsewhere."""

    reason: str


class SessionReady(SlotRecord, frozen=True, kw_only=True, tag="report.ready"):
    """The sandbox is prepared and occupies a READY slot."""


class SessionRunning(SlotRecord, frozen=True, kw_only=True, tag="report.running"):
    """The agent has started and occupies a run slot."""


class SessionExited(SlotRecord, frozen=True, kw_only=True, tag="report.exited"):
    """The process tree is gone and the run slot is free; POSTRUN goes on. The gateway closes the token."""


class SessionFinished(SlotRecord, frozen=True, kw_only=True, tag="report.finished"):
    """The node is done with this attempt, whatever stage it had reached; all its slots are free."""

    outcome: Outcome
    reason: str = ""


class SessionAssembled(Record, frozen=True, kw_only=True, tag="report.assembled"):
    """The assembler's verdict on one attempt, in the same transaction as its traces.

    ``usable`` sessions carry a reward and may be trained; ``infrastructure`` ones are dispatched again.
    """

    session_id: str
    attempt: int
    group_id: str
    usable: bool
    infrastructure: bool
    reward: float | None
    traces: int
    reason: str = ""


class GroupSettled(Record, frozen=True, kw_only=True, tag="group.settled"):
    """The scheduler's own note, in one transaction with the group's ``GroupClosed`` on ``polar.traces``.

    After a restart it knows by this that the group is closed. Key: group_id.
    """

    group_id: str


Command = Prewarm | Run | Cancel | Drain
Report = (
    NodeRegistered
    | NodeHeartbeat
    | NodeLost
    | SessionReady
    | SessionRunning
    | SessionExited
    | SessionFinished
    | SessionAssembled
    | GroupSettled
)
SchedulerRecord = Command | Report
