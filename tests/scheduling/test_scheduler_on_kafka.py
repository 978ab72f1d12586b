"""The scheduler's process on a real broker, with nodes and an assembler that this test plays."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from world import assembled, registered, task

from consumers.scheduler import TRANSACTIONAL_ID
from polar.settings import Settings, to_environment
from schemas.ids import new_id
from schemas.scheduling import (
    GroupSettled,
    NodeHeartbeat,
    NodeLost,
    Prewarm,
    Run,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
)
from schemas.tasks import TaskSubmitted
from schemas.traces import GroupClosed
from streams.consumer import Reader
from streams.errors import Fenced
from streams.producer import Producer
from streams.topics import SCHEDULER, TASKS, TRACES

pytestmark = pytest.mark.kafka

DEADLINE_S = 90
LEASE_S = 2.0


@asynccontextmanager
async def scheduler(kafka: str):
    """``python -m consumers.scheduler``, ended by SIGKILL."""
    settings = Settings(kafka_bootstrap=kafka, batch_groups=100, node_lease_s=LEASE_S)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "consumers.scheduler",
        env=os.environ | to_environment(settings),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def has_caught_up(process) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while b"caught up" not in await process.stderr.readline():
            pass


class Stage:
    """Plays every node and the assembler; keeps what it read."""

    def __init__(self, reader: Reader, producer: Producer) -> None:
        self.reader, self.producer = reader, producer
        self.records: list = []
        self.silent: set[str] = set()
        self.group_of: dict[str, str] = {}

    async def submit(self, run: str, groups: int, samples: int = 2) -> None:
        for number in range(groups):
            await self.producer.send(TASKS, TaskSubmitted(task=task(f"{run}-{number:03}", samples)))

    async def beat(self, living: list[tuple[str, str]]) -> None:
        """Heartbeats of ``living`` until this is cancelled."""
        while True:
            for node_id, incarnation in living:
                if node_id not in self.silent:
                    await self.producer.send(SCHEDULER, NodeHeartbeat(node_id=node_id, incarnation=incarnation))
            await asyncio.sleep(0.3)

    async def until(self, wanted, act: bool = True) -> None:
        """Reads, and does what a node and the assembler would, until ``wanted()``."""
        async with asyncio.timeout(DEADLINE_S):
            while not wanted():
                for one in await self.reader.poll(0.2):
                    self.records.append(one.record)
                    if act and getattr(one.record, "node_id", None) not in self.silent:
                        await self.answer(one.record)

    async def answer(self, record) -> None:
        if isinstance(record, Prewarm):
            self.group_of[record.session_id] = record.task.task_id
            await self.report(record, SessionReady)
        if isinstance(record, Run):
            for kind in (SessionRunning, SessionExited):
                await self.report(record, kind)
            verdict = assembled(record.session_id, record.attempt, self.group_of[record.session_id])
            await self.producer.send(SCHEDULER, verdict)
            await self.report(record, SessionFinished, outcome="completed")

    async def report(self, command, kind: type, **fields) -> None:
        record = kind(
            node_id=command.node_id,
            incarnation=command.incarnation,
            session_id=command.session_id,
            attempt=command.attempt,
            **fields,
        )
        await self.producer.send(SCHEDULER, record)

    def of(self, kind: type, run: str = "") -> list:
        return [r for r in self.records if isinstance(r, kind) and getattr(r, "group_id", run).startswith(run)]


@asynccontextmanager
async def stage(kafka: str, *node_ids: str):
    async with (
        Producer(kafka, source="test") as producer,
        Reader(kafka, [SCHEDULER, TRACES], source="test", start="end") as reader,
    ):
        played = Stage(reader, producer)
        nodes = [(node_id, f"{node_id}-{new_id()}") for node_id in node_ids]
        for node_id, incarnation in nodes:
            await producer.send(SCHEDULER, registered(node_id, incarnation))
        beating = asyncio.create_task(played.beat(nodes))
        try:
            yield played
        finally:
            beating.cancel()
            for node_id, incarnation in nodes:
                await producer.send(SCHEDULER, NodeLost(node_id=node_id, incarnation=incarnation, reason="test ended"))


def check_once(played: Stage, run: str, groups: int, samples: int = 2) -> None:
    closed = played.of(GroupClosed, run)
    assert Counter(group.group_id for group in closed) == Counter(f"{run}-{n:03}" for n in range(groups))
    assert Counter(r.group_id for r in played.of(GroupSettled, run)) == Counter(group.group_id for group in closed)
    for kind in (Prewarm, Run):
        commands = [r for r in played.of(kind) if played.group_of[r.session_id].startswith(run)]
        assert set(Counter((r.session_id, r.attempt) for r in commands).values()) == {1}
        assert len(commands) == groups * samples
    assert all(member.usable for group in closed for member in group.members)


async def test_killed_in_the_middle_and_started_again_it_loses_and_doubles_nothing(kafka: str) -> None:
    run = new_id()
    async with stage(kafka, "a", "b") as played:
        await played.submit(run, 24)
        for part in range(1, 4):
            async with scheduler(kafka):
                await played.until(lambda part=part: len(played.of(GroupClosed, run)) >= 6 * part)
        async with scheduler(kafka):
            await played.until(lambda: len(played.of(GroupClosed, run)) == 24)
            await played.until(lambda: len(played.of(GroupSettled, run)) == 24)
        for one in await played.reader.read_to_end():
            played.records.append(one.record)
    check_once(played, run, 24)


async def test_a_start_behind_an_open_transaction_repeats_no_command(kafka: str) -> None:
    """Committed readers stop at the assembler's open transaction, beyond which a former scheduler has committed."""
    run = new_id()
    async with (
        stage(kafka, "c") as played,
        Producer(kafka, source="assembler", transactional_id="test-assembler") as assembler,
        Reader(kafka, [SCHEDULER], source="test", start="end", read_committed=False) as uncommitted,
    ):
        async with scheduler(kafka) as former:
            await has_caught_up(former)
            async with assembler.transaction():
                await assembler.send(SCHEDULER, assembled("nobody", 1, "nobody"))
                await played.submit(run, 1)
                prewarms: list = []
                async with asyncio.timeout(DEADLINE_S):
                    while len(prewarms) < 2:
                        prewarms += [
                            one.record for one in await uncommitted.poll(0.2) if isinstance(one.record, Prewarm)
                        ]
                former.kill()
                async with scheduler(kafka) as new:
                    # Longer than a lease, and the new one cannot know yet what it has commanded.
                    async with asyncio.timeout(DEADLINE_S):
                        beats = 0
                        while beats < 2 * LEASE_S / 0.3:
                            beats += sum(isinstance(one.record, NodeHeartbeat) for one in await uncommitted.poll(0.2))
                    assert new.returncode is None
        async with scheduler(kafka):
            await played.until(lambda: len(played.of(GroupSettled, run)) == 1)
    check_once(played, run, 1)
    assert not played.of(NodeLost)


async def test_a_silent_node_is_lost_and_its_sessions_run_elsewhere_under_the_next_attempt(kafka: str) -> None:
    run = new_id()
    async with stage(kafka, "d") as played, scheduler(kafka):
        played.silent.add("d")
        await played.submit(run, 1)
        await played.until(lambda: len([r for r in played.of(NodeLost) if r.node_id == "d"]) == 1)
        first = [r for r in played.of(Prewarm) if r.task.task_id.startswith(run)]
        assert [(r.node_id, r.attempt) for r in first] == [("d", 1)] * 2
        async with stage(kafka, "e"):
            await played.until(lambda: len(played.of(GroupClosed, run)) == 1)
    again = [r for r in played.of(Prewarm) if r.task.task_id.startswith(run)][2:]
    assert [(r.node_id, r.attempt) for r in again] == [("e", 2)] * 2
    [group] = played.of(GroupClosed, run)
    assert [(member.usable, member.attempt) for member in group.members] == [(True, 2)] * 2


async def test_a_newer_scheduler_fences_the_older_one(kafka: str) -> None:
    run = new_id()
    async with Producer(kafka, source="zombie", transactional_id=TRANSACTIONAL_ID) as zombie:
        with pytest.raises(Fenced):
            async with zombie.transaction():
                await zombie.send(SCHEDULER, GroupSettled(group_id=f"{run}-000"))
                async with stage(kafka, "f") as played, scheduler(kafka):
                    await played.submit(run, 1)
                    await played.until(lambda: len(played.of(GroupSettled, run)) == 1)
    check_once(played, run, 1)
