"""The assembler: stories of ``polar.sessions`` become traces, and one verdict an attempt.

Traces, verdict and the group's positions go out in one transaction. The position of a partition is the first event of
its oldest session without a verdict, so a killed assembler holds nothing that the log does not: started again it reads
on from there, and leaves out the attempts whose verdict already stands in ``polar.scheduler``.

Several members share the partitions; each needs its own POLAR_ASSEMBLER_ID, which names its transactional id. A second
process with the same one fences the first. A member that lost its partitions while it slept is not fenced: aiokafka
does not send the group's generation with the offsets of a transaction. What it still commits is harmless: its positions
were right when it held them, and traces and verdicts that come twice have the same ids and bytes, which readers drop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from consumers.process import run_process, say_ready
from polar.settings import Settings
from polar.trajectories.assembly import Assembly
from polar.trajectories.fates import FOLLOWED, Fates
from polar.trajectories.open_sessions import OpenSessions
from streams.codec import types_of
from streams.consumer import GroupReader, Reader, Received
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS, TRACES

GROUP = "polar-assembler"
POLL_S = 0.25

log = logging.getLogger("polar.assembler")


class Assembler:
    """Runs until ``stop`` is set. Raises StreamError when it cannot go on: start it again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._source = f"polar-assembler-{settings.assembler_id}"
        self._fates = Fates()
        self._sessions = OpenSessions(self._fates, settings.assembly_grace_s)
        self._committed: dict[int, int] = {}
        self._fates_are_stale = True
        self._writing = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> None:
        bootstrap = self._settings.kafka_bootstrap
        producer = Producer(bootstrap, source=self._source, transactional_id=self._source)
        follower = Reader(bootstrap, [SCHEDULER], source=self._source, skip_types=types_of(SCHEDULER) - FOLLOWED)
        members = GroupReader(
            bootstrap,
            [SESSIONS],
            group_id=GROUP,
            source=self._source,
            on_revoked=self._on_revoked,
            on_assigned=self._on_assigned,
        )
        async with producer, follower, members:
            log.info("reading %s as %s", SESSIONS, self._source)
            while not stop.is_set():
                await self._step(producer, follower, members)

    async def _step(self, producer: Producer, follower: Reader, members: GroupReader) -> None:
        received = await members.poll(POLL_S)
        await self._follow(follower)
        now_s = time.monotonic()
        # Partitions may have gone while the fates were read.
        for one in members.still_ours(received):
            self._sessions.add(one.partition, one.offset, one.record, now_s)
        verdicts = self._sessions.ready(now_s)
        if verdicts or not received:
            await self._write(producer, verdicts)

    async def _follow(self, follower: Reader) -> None:
        """Reads the fates on; to the end, where partitions came that another member may have written about."""
        stale, self._fates_are_stale = self._fates_are_stale, False
        if stale:
            async for chunk in follower.chunks_to_end():
                self._fold(chunk)
        else:
            self._fold(await follower.poll(0.0))

    def _fold(self, chunk: list[Received]) -> None:
        for one in chunk:
            self._fates.add(one.record)

    async def _write(self, producer: Producer, verdicts: list[Assembly]) -> None:
        async with self._writing:
            positions = self._sessions.positions(verdicts)
            if not verdicts and positions == self._committed:
                return
            async with producer.transaction():
                for assembly in verdicts:
                    for trace in assembly.traces:
                        await producer.post(TRACES, trace)
                    await producer.post(SCHEDULER, assembly.verdict)
                await producer.send_offsets({(SESSIONS, p): offset for p, offset in positions.items()}, GROUP)
            self._sessions.settle(verdicts)
            self._committed = positions
        for assembly in verdicts:
            _report(assembly)

    async def _on_revoked(self, partitions: set[tuple[str, int]]) -> None:
        """Waits for the transaction in flight, so that the next owner reads from what it commits."""
        async with self._writing:
            self._sessions.drop({partition for _, partition in partitions})

    def _on_assigned(self, partitions: set[tuple[str, int]]) -> None:
        self._fates_are_stale = True
        log.info("has partitions %s", sorted(partition for _, partition in partitions))
        say_ready()


def _report(assembly: Assembly) -> None:
    verdict = assembly.verdict
    end = "usable" if verdict.usable else "infrastructure" if verdict.infrastructure else "unusable"
    reason = f": {verdict.reason}" if verdict.reason else ""
    log.info("session %s attempt %d: %s, %d traces%s", verdict.session_id, verdict.attempt, end, verdict.traces, reason)


async def assemble_sessions(settings: Settings, stop: asyncio.Event) -> None:
    """Runs the assembler until ``stop`` is set."""
    await Assembler(settings).run(stop)


if __name__ == "__main__":
    sys.exit(run_process("polar-assembler", assemble_sessions))
