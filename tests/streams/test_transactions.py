"""Transactions on a real broker: all or nothing, also when a process is killed or has become a zombie."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import pytest

from schemas.ids import new_id
from schemas.sessions import SessionClosed
from schemas.tasks import TaskCancelled
from streams.consumer import GroupReader, Reader, read_last
from streams.errors import Fenced
from streams.producer import Producer
from streams.topics import SESSIONS, TASKS

pytestmark = pytest.mark.kafka


def closed(session_id: str, reason: str = "") -> SessionClosed:
    return SessionClosed(session_id=session_id, attempt=0, outcome="completed", reason=reason)


async def test_a_transaction_is_invisible_until_it_is_committed_and_then_whole(kafka):
    sessions = [new_id() for _ in range(10)]
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Reader(kafka, [SESSIONS], source="test", start="end", read_committed=False) as peeking,
        Producer(kafka, source="test", transactional_id=new_id()) as producer,
    ):
        async with producer.transaction():
            for session in sessions:
                await producer.send(SESSIONS, closed(session))
            assert await reader.read_to_end() == []
            assert {one.record.session_id for one in await peeking.read_to_end()} == set(sessions)
        assert {one.record.session_id for one in await reader.read_to_end()} == set(sessions)


async def test_an_aborted_transaction_is_never_seen_and_the_producer_goes_on(kafka):
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test", transactional_id=new_id()) as producer,
    ):
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction():
                await producer.send(SESSIONS, closed("lost"))
                raise ZeroDivisionError
        async with producer.transaction():
            await producer.send(SESSIONS, closed("kept"))
        assert [one.record.session_id for one in await reader.read_to_end()] == ["kept"]


async def test_a_cancelled_transaction_is_aborted(kafka):
    sent = asyncio.Event()
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test", transactional_id=new_id()) as producer,
    ):

        async def forever():
            async with producer.transaction():
                await producer.send(SESSIONS, closed("lost"))
                sent.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(forever())
        await sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with producer.transaction():
            await producer.send(SESSIONS, closed("kept"))
        assert [one.record.session_id for one in await reader.read_to_end()] == ["kept"]


async def test_reading_to_the_end_ends_where_markers_and_aborted_records_come_last(kafka):
    async with (
        Reader(kafka, [TASKS], source="test", start="end") as reader,
        Producer(kafka, source="test", transactional_id=new_id()) as producer,
    ):
        async with producer.transaction():
            kept = await producer.send(TASKS, TaskCancelled(task_id="t"))
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction():
                    await producer.send(TASKS, TaskCancelled(task_id="t"))
                    raise ZeroDivisionError
        async with asyncio.timeout(20):
            assert [one.offset for one in await reader.read_to_end()] == [kept.offset]
            assert await reader.read_to_end() == []
        assert reader.positions()[TASKS, kept.partition] == kept.offset + 8
    last = [one for one in await read_last(kafka, TASKS, 1) if one.partition == kept.partition]
    assert [one.offset for one in last] == [kept.offset]


async def test_posts_that_nobody_awaited_are_in_the_transaction(kafka):
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test", transactional_id=new_id()) as producer,
    ):
        async with producer.transaction():
            for n in range(50):
                await producer.post(SESSIONS, closed("posted", str(n)))
        assert [one.record.reason for one in await reader.read_to_end()] == [str(n) for n in range(50)]


async def test_offsets_and_records_are_committed_together(kafka):
    group, transactional_id = new_id(), new_id()
    async with Producer(kafka, source="test") as plain:
        position = await plain.send(SESSIONS, closed("read"))
    partition = (SESSIONS, position.partition)

    async def committed_after(outcome: type[BaseException] | None) -> int | None:
        async with Producer(kafka, source="test", transactional_id=transactional_id) as producer:
            with suppress(ZeroDivisionError):
                async with producer.transaction():
                    await producer.send(SESSIONS, closed("written"))
                    await producer.send_offsets({partition: position.offset + 1}, group)
                    if outcome is not None:
                        raise outcome
        # A producer of the same id starts when the last transaction's offsets are in their place.
        async with Producer(kafka, source="test", transactional_id=transactional_id):
            async with GroupReader(kafka, [SESSIONS], group_id=group, source="test") as reader:
                return (await reader.committed([partition]))[partition]

    assert await committed_after(ZeroDivisionError) is None
    assert await committed_after(None) == position.offset + 1


@pytest.mark.parametrize("moment", ["before sending", "in the middle"])
async def test_a_zombie_is_fenced_and_nothing_of_it_is_seen(kafka, moment):
    transactional_id = new_id()
    async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
        async with Producer(kafka, source="zombie", transactional_id=transactional_id) as zombie:
            with pytest.raises(Fenced, match="newer process"):
                async with zombie.transaction():
                    if moment == "in the middle":
                        await zombie.send(SESSIONS, closed("zombie"))
                    async with Producer(kafka, source="heir", transactional_id=transactional_id) as heir:
                        async with heir.transaction():
                            await heir.send(SESSIONS, closed("heir"))
                    await zombie.send(SESSIONS, closed("zombie"))
            with pytest.raises(Fenced):
                async with zombie.transaction():
                    await zombie.send(SESSIONS, closed("zombie"))
        assert [one.record.session_id for one in await reader.read_to_end()] == ["heir"]


HANGING = """
import asyncio, sys
from schemas.sessions import SessionClosed
from streams.producer import Producer

async def main(bootstrap, transactional_id):
    async with Producer(bootstrap, source="victim", transactional_id=transactional_id) as producer:
        async with producer.transaction():
            await producer.send("polar.sessions", SessionClosed(session_id="victim", attempt=0, outcome="completed"))
            print("sent", flush=True)
            await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_transaction_of_a_killed_process_ends_when_its_heir_starts(kafka):
    transactional_id = new_id()
    async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HANGING, kafka, transactional_id, stdout=asyncio.subprocess.PIPE
        )
        assert await victim.stdout.readline() == b"sent\n"
        victim.kill()
        await victim.wait()
        async with Producer(kafka, source="test") as plain:
            behind = await plain.send(SESSIONS, closed("victim", "behind the open transaction"))
        assert await reader.read_to_end() == []
        async with Producer(kafka, source="heir", transactional_id=transactional_id):
            received = await reader.poll(10)
        assert [(one.offset, one.record.reason) for one in received] == [(behind.offset, "behind the open transaction")]
