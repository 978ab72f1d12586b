"""The scheduler: folds the log, decides (``polar/scheduling``), writes each decision in one transaction.

- It keeps nothing: a start reads tasks, scheduler, batches (without traces) and weights from their beginnings.
- One at a time: the transactional id fences an older process, which then cannot commit; it ends with exit code 1.
- It decides only when its last decision has been read back, so the log alone makes the state. At a start it first reads
  up to the end of the log as uncommitted readers see it: behind an open transaction of the assembler there may be
  commands of a former scheduler that are committed and not yet to be read.
- Heartbeats are read uncommitted, for the same reason: an open transaction must not make nodes look dead.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable
from typing import get_args

from consumers.process import run_process, say_ready
from polar.scheduling.decider import Pace, decide
from polar.scheduling.leases import Leases
from polar.scheduling.state import State, evolve
from polar.settings import Settings
from schemas.record import Record
from schemas.scheduling import NodeHeartbeat, NodeLost, SchedulerRecord
from schemas.traces import GroupClosed
from streams.consumer import Reader, Received
from streams.errors import KafkaUnavailable
from streams.producer import Producer
from streams.topics import BATCHES, SCHEDULER, TASKS, TRACES, WEIGHTS

SOURCE = "scheduler"
TRANSACTIONAL_ID = "polar-scheduler"
POLL_S = 0.25
READ_BACK_S = 120.0
"""Longer than the broker lets a killed producer's transaction hold back committed readers."""

HEARTBEAT = str(NodeHeartbeat.__struct_config__.tag)
NOT_FOLDED = frozenset({"batch.trace", HEARTBEAT})
NO_HEARTBEAT = frozenset(str(kind.__struct_config__.tag) for kind in get_args(SchedulerRecord)) - {HEARTBEAT}

log = logging.getLogger(__name__)


class Scheduler:
    """One process's view of the log, and its next decision."""

    def __init__(self, settings: Settings, producer: Producer, reader: Reader, pulse: Reader) -> None:
        self._settings = settings
        self._pace = Pace(batch_groups=settings.batch_groups, staleness_limit=settings.staleness_limit)
        self._producer = producer
        self._reader = reader
        self._pulse = pulse
        self._state = State()
        self._leases = Leases(settings.node_lease_s)

    async def catch_up(self) -> None:
        """Folds the whole log. Raises KafkaUnavailable if its end cannot be reached."""
        await self._read_back(self._pulse.positions()[SCHEDULER, 0])
        async for chunk in self._reader.chunks_to_end():
            self._fold(chunk)
        log.info("caught up: %d nodes, %d groups not settled", len(self._state.nodes), len(self._state.groups))

    async def step(self) -> None:
        """Decides once and reads the decision back; without one, waits a moment for news."""
        decision = await self._lost_nodes() or decide(self._state, self._pace)
        if decision:
            await self._read_back(await self._write(decision))
        self._fold(await self._reader.poll(timeout_s=0.0 if decision else POLL_S))

    async def _write(self, decision: list[Record]) -> int:
        """Returns the offset after the last record on ``polar.scheduler``."""
        async with self._producer.transaction():
            written = [
                await self._producer.post(TRACES if isinstance(record, GroupClosed) else SCHEDULER, record)
                for record in decision
            ]
        for record in decision:
            log.info("%s", _line(record))
        return max(position.offset for position in await asyncio.gather(*written) if position.topic == SCHEDULER) + 1

    async def _read_back(self, offset: int) -> None:
        deadline = time.monotonic() + READ_BACK_S
        while self._reader.positions()[SCHEDULER, 0] < offset:
            if time.monotonic() > deadline:
                raise KafkaUnavailable(
                    f"{SCHEDULER} cannot be read up to offset {offset}: a transaction has been open for "
                    f"{READ_BACK_S:.0f} s; look for a hanging writer (kafka-transactions.sh find-hanging)"
                )
            self._fold(await self._reader.poll(timeout_s=POLL_S))

    def _fold(self, received: Iterable[Received]) -> None:
        for one in received:
            evolve(self._state, one.record)

    async def _lost_nodes(self) -> list[Record]:
        """A node counts as silent only when everything that is on the topic by now was read."""
        now = time.monotonic()
        living = [(node_id, node.registered.incarnation) for node_id, node in self._state.nodes.items()]
        self._leases.watch(living, now)
        self._hear(await self._pulse.poll(timeout_s=0.0), now)
        if self._leases.expired(now):
            self._hear(await self._pulse.read_to_end(), now)
        reason = f"not heard for {self._settings.node_lease_s:g} s"
        return [
            NodeLost(node_id=node_id, incarnation=incarnation, reason=reason)
            for node_id, incarnation in self._leases.expired(now)
        ]

    def _hear(self, received: Iterable[Received], now: float) -> None:
        for one in received:
            self._leases.heard((one.record.node_id, one.record.incarnation), now)


def _line(record: Record) -> str:
    names = ("node_id", "session_id", "attempt", "group_id", "reason")
    told = [f"{name}={getattr(record, name)}" for name in names if hasattr(record, name)]
    return " ".join([str(record.__struct_config__.tag), *told])


async def schedule(settings: Settings, stop: asyncio.Event) -> None:
    """Runs until ``stop``. Raises Fenced when a newer scheduler has started, KafkaUnavailable."""
    bootstrap = settings.kafka_bootstrap
    async with (
        # First of all: from here on no former scheduler can commit.
        Producer(bootstrap, source=SOURCE, transactional_id=TRANSACTIONAL_ID) as producer,
        Reader(
            bootstrap, [SCHEDULER], source=SOURCE, start="end", read_committed=False, skip_types=NO_HEARTBEAT
        ) as pulse,
        Reader(
            bootstrap,
            [TASKS, SCHEDULER, BATCHES, WEIGHTS],
            source=SOURCE,
            start="beginning",
            skip_types=NOT_FOLDED,
        ) as reader,
    ):
        scheduler = Scheduler(settings, producer, reader, pulse)
        await scheduler.catch_up()
        say_ready()
        while not stop.is_set():
            await scheduler.step()


if __name__ == "__main__":
    sys.exit(run_process(SOURCE, schedule))
