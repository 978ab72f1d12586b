"""The batcher's process on a real broker: killed in the middle, started twice, and what is in the topic then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from traces_made import POLICY, whole_group

from consumers.batcher import GROUP_ID, TRANSACTIONAL_ID, form_batches
from polar.settings import Settings, to_environment
from schemas.batches import BatchSealed, BatchTrace, GroupExcluded
from schemas.ids import new_id
from streams.admin import topic_lag
from streams.consumer import Reader
from streams.errors import Fenced
from streams.producer import Producer
from streams.topics import BATCHES, TRACES

pytestmark = pytest.mark.kafka

DEADLINE_S = 90


def settings_of(kafka: str) -> Settings:
    return Settings(kafka_bootstrap=kafka, batch_groups=2, staleness_limit=1000)


@asynccontextmanager
async def batcher(kafka: str):
    """``python -m consumers.batcher``, ended by SIGKILL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "consumers.batcher",
        env=os.environ | to_environment(settings_of(kafka)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Batches:
    """Follows the topic of batches from here on."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.records: list = []

    async def until(self, wanted) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted():
                self.records += [one.record for one in await self.reader.poll(0.2)]

    def of(self, kind: type) -> list:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def ended(self) -> Counter:
        groups = [group.group_id for seal in self.of(BatchSealed) for group in seal.groups]
        return Counter(groups + [record.group_id for record in self.of(GroupExcluded)])


@asynccontextmanager
async def following(kafka: str):
    async with Reader(kafka, [BATCHES], source="test", start="end") as reader:
        yield Batches(reader)


def groups_named(run: str, count: int) -> list[list]:
    """Every fourth group has no variance, so that exclusions stand between batches."""
    return [
        whole_group(f"{run}-{number}", rewards=(1.0, 1.0) if number % 4 == 3 else (0.0, 1.0)) for number in range(count)
    ]


async def write(kafka: str, groups: list[list]) -> None:
    async with Producer(kafka, source="test") as producer:
        for group in groups:
            for record in group:
                await producer.post(TRACES, record)
        await producer.send(TRACES, groups[-1][0])  # Once more, and waited for.


def check(batches: Batches, groups: list[list], first: int) -> None:
    seals = batches.of(BatchSealed)
    assert [seal.batch for seal in seals] == list(range(first, first + len(seals)))
    assert batches.ended == Counter({group[0].group_id: 1 for group in groups})
    position = 0
    for seal in seals:
        inside = [record for record in batches.of(BatchTrace) if record.batch == seal.batch]
        assert [record.index for record in inside] == list(range(seal.traces))
        assert {record.trace.group_id for record in inside} == {group.group_id for group in seal.groups}
        at = batches.records.index(inside[0])
        assert at >= position and batches.records[at : at + seal.traces + 1] == [*inside, seal]
        position = at


async def test_killed_in_the_middle_and_started_again_it_loses_and_doubles_nothing(kafka: str) -> None:
    groups = groups_named(new_id(), 48)
    async with following(kafka) as batches:
        for chunk in range(0, 48, 12):
            async with batcher(kafka):
                await write(kafka, groups[chunk : chunk + 12])
                seen = len(batches.records)
                await batches.until(lambda seen=seen: len(batches.records) > seen)
            # Killed here, wherever it was: the first of its transactions has just become visible.
        async with batcher(kafka):
            await batches.until(lambda: len(batches.ended) == 48)
            await batches.until(lambda: len(batches.of(BatchSealed)) == 18)
        batches.records += [one.record for one in await batches.reader.read_to_end()]
        check(batches, groups, first=batches.of(BatchSealed)[0].batch)
    lags = {topic.topic: topic.group_lags for topic in await topic_lag(kafka)}
    assert lags[TRACES][GROUP_ID] < 10


async def test_a_transaction_that_was_open_when_its_process_died_leaves_nothing(kafka: str) -> None:
    groups = groups_named(new_id(), 2)
    await write(kafka, groups)
    stranger = whole_group("stranger")
    async with following(kafka) as batches:
        async with Producer(kafka, source="zombie", transactional_id=TRANSACTIONAL_ID) as zombie:
            with pytest.raises(Fenced):
                async with zombie.transaction():
                    await zombie.send(BATCHES, BatchTrace(policy=POLICY, batch=999, index=0, trace=stranger[0]))
                    async with batcher(kafka):
                        await batches.until(lambda: len(batches.ended) == 2)
        assert {record.batch for record in batches.of(BatchTrace)} == {batches.of(BatchSealed)[0].batch}
        check(batches, groups, first=batches.of(BatchSealed)[0].batch)


async def test_a_second_batcher_takes_over_and_the_first_ends_with_one_line(kafka: str) -> None:
    first_groups, second_groups = groups_named(new_id(), 2), groups_named(new_id(), 2)
    async with following(kafka) as batches, batcher(kafka) as old:
        await write(kafka, first_groups)
        await batches.until(lambda: len(batches.ended) == 2)
        async with batcher(kafka) as new:
            async with asyncio.timeout(DEADLINE_S):
                while b"goes on after" not in await new.stderr.readline():
                    pass
            await write(kafka, second_groups)
            await batches.until(lambda: len(batches.ended) == 4)
            async with asyncio.timeout(DEADLINE_S):
                _, stderr = await old.communicate()
        assert old.returncode == 1
        assert "has taken over" in stderr.decode().splitlines()[-1]
        check(batches, first_groups + second_groups, first=batches.of(BatchSealed)[0].batch)


async def test_sigterm_ends_it_cleanly(kafka: str) -> None:
    groups = groups_named(new_id(), 2)
    async with following(kafka) as batches, batcher(kafka) as process:
        await write(kafka, groups)
        await batches.until(lambda: len(batches.ended) == 2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            _, stderr = await process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in stderr.decode()


async def test_it_stops_between_two_polls(kafka: str) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(form_batches(settings_of(kafka), stop))
    groups = groups_named(new_id(), 2)
    async with following(kafka) as batches:
        await write(kafka, groups)
        await batches.until(lambda: len(batches.ended) == 2)
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await running
        check(batches, groups, first=batches.of(BatchSealed)[0].batch)
