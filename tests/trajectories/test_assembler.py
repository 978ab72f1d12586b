"""The assembler on a real broker: killed in the middle it writes the traces of a calm run, each verdict once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace

import msgspec
import pytest
from session_stories import opened, session

from consumers.assembler import Assembler
from polar.settings import Settings, to_environment
from polar.trajectories import Story, assemble
from schemas.ids import new_id
from schemas.scheduling import SessionAssembled
from schemas.traces import Trace
from streams.consumer import GroupReader, Reader
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS, TRACES

pytestmark = pytest.mark.kafka
DEADLINE_S = 90.0


class Seen:
    """What committed readers have seen, of this test's sessions alone."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix = reader, prefix
        self.traces: list[Trace] = []
        self.verdicts: list[SessionAssembled] = []

    async def until(self, verdicts: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len({(v.session_id, v.attempt) for v in self.verdicts}) < verdicts:
                for one in await self._reader.poll(1.0):
                    if one.record.session_id.startswith(self._prefix):
                        (self.traces if one.topic == TRACES else self.verdicts).append(one.record)


@asynccontextmanager
async def watching(kafka, prefix):
    async with Reader(kafka, [TRACES, SCHEDULER], source="test", start="end") as reader:
        yield Seen(reader, prefix)


@asynccontextmanager
async def process(kafka, tmp_path, assembler_id="1"):
    """``python -m consumers.assembler``, killed at the end."""
    settings = Settings(kafka_bootstrap=kafka, run_dir=tmp_path, assembly_grace_s=1.0, assembler_id=assembler_id)
    environment = os.environ | to_environment(settings)
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "consumers.assembler", env=environment)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGKILL)
        await child.wait()


async def publish(kafka, stories):
    """Interleaves the stories, so that some session is always open."""
    async with Producer(kafka, source="test") as producer:
        acks = [
            await producer.post(SESSIONS, record)
            for turn in zip_longest(*stories)
            for record in turn
            if record is not None
        ]
        await asyncio.gather(*acks)


def calm(stories):
    """The traces of a run that nothing disturbs, by id."""
    traces = {}
    for records in stories:
        story = Story(records[0].session_id)
        for record in records:
            story.add(record)
        traces |= {trace.trace_id: trace for trace in assemble(story).traces}
    return traces


def check(seen, expected, sessions):
    """Each trace and verdict once, and byte for byte what was expected."""
    assert sorted(msgspec.json.encode(t) for t in seen.traces) == sorted(map(msgspec.json.encode, expected.values()))
    assert sorted((v.session_id, v.usable) for v in seen.verdicts) == sorted((name, True) for name in sessions)


async def test_killed_in_the_middle_and_started_again_the_traces_are_those_of_a_calm_run(kafka, tmp_path):
    prefix = new_id()
    names = [f"{prefix}-{n}" for n in range(60)]
    stories = [session(name, f"group-{n % 7}", calls=1 + n % 5) for n, name in enumerate(names)]
    waiting = session(f"{prefix}-slow", "group-0", calls=4)
    async with watching(kafka, prefix) as seen:
        async with process(kafka, tmp_path) as child:
            # The slow session stays open while others end: their partition's position is held back.
            await publish(kafka, [waiting[:3], *stories[:20]])
            await seen.until(5)
            await publish(kafka, stories[20:40])
            await seen.until(12)
            child.send_signal(signal.SIGKILL)
            await child.wait()
        async with process(kafka, tmp_path) as child:
            await publish(kafka, [waiting[3:], *stories[40:]])
            await seen.until(30)
            child.send_signal(signal.SIGKILL)
            await child.wait()
        async with process(kafka, tmp_path) as child:
            await seen.until(61)
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
    check(seen, calm([waiting, *stories]), [*names, f"{prefix}-slow"])


async def test_a_second_member_takes_over_half_and_then_all_of_the_partitions(kafka, tmp_path):
    prefix = new_id()
    names = [f"{prefix}-{n}" for n in range(30)]
    stories = [session(name, "group", calls=2) for name in names]
    async with watching(kafka, prefix) as seen:
        async with process(kafka, tmp_path, "a") as first:
            await publish(kafka, [story[:4] for story in stories[:10]] + stories[10:20])
            await seen.until(10)
            async with process(kafka, tmp_path, "b") as second:
                await publish(kafka, [story[4:] for story in stories[:10]])
                await seen.until(20)
                first.send_signal(signal.SIGTERM)
                assert await first.wait() == 0
                await publish(kafka, stories[20:])
                await seen.until(30)
                second.send_signal(signal.SIGTERM)
                assert await second.wait() == 0
    check(seen, calm(stories), names)


async def test_records_of_partitions_that_go_while_the_fates_are_read_are_left_out(kafka, tmp_path):
    assembler = Assembler(Settings(kafka_bootstrap=kafka, run_dir=tmp_path))
    assembler._fates_are_stale = False
    member = partial(GroupReader, kafka, [SESSIONS], group_id=new_id(), source="test")
    async with (
        asyncio.timeout(DEADLINE_S),
        Producer(kafka, source="test") as producer,
        member(on_revoked=assembler._on_revoked) as first,
        AsyncExitStack() as members,
    ):
        await producer.send(SESSIONS, opened(new_id()))
        while not (received := await first.poll()):
            pass

        async def rebalance(timeout_s):
            second = await members.enter_async_context(member())
            while not second.assignment():
                await second.poll(0.1)
            return []

        async def poll(timeout_s):
            return received

        polled = SimpleNamespace(poll=poll, still_ours=first.still_ours)
        assert first.still_ours(received) == received
        await assembler._step(producer, SimpleNamespace(poll=rebalance), polled)
    assert len(assembler._sessions) == 0 and assembler._sessions.positions() == {}


async def test_a_lost_call_is_waited_for_and_the_session_runs_again(kafka, tmp_path):
    name = new_id()
    records = [r for r in session(name, calls=2) if type(r).__name__ not in ("CallDelivery",)]
    broken = [r for r in records if not (type(r).__name__ == "CallCompleted" and r.call_id.endswith("c2"))]
    settings = Settings(kafka_bootstrap=kafka, run_dir=tmp_path, assembly_grace_s=0.5, assembler_id="lost")
    stop = asyncio.Event()
    async with watching(kafka, name) as seen, asyncio.TaskGroup() as tasks:
        tasks.create_task(Assembler(settings).run(stop))
        await publish(kafka, [broken])
        await seen.until(1)
        await publish(kafka, [[opened(name, 1), *session(name, calls=2, attempt=1)[1:]]])
        await seen.until(2)
        stop.set()
    first, second = seen.verdicts
    assert (first.attempt, first.usable, first.infrastructure) == (0, False, True) and "lost" in first.reason
    assert (second.attempt, second.usable, second.traces) == (1, True, 1)
    assert [trace.attempt for trace in seen.traces] == [1]


async def test_a_broker_that_is_away_is_one_line(tmp_path):
    settings = Settings(kafka_bootstrap="127.0.0.1:1", run_dir=tmp_path)
    child = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "consumers.assembler"],
        env=os.environ | to_environment(settings),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(child.communicate(), DEADLINE_S)
    assert child.returncode == 1
    line = stderr.decode().splitlines()[-1]
    assert "127.0.0.1:1" in line and "check that the broker runs" in line and b"Traceback" not in stderr
