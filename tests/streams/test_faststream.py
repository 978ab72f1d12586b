"""Handlers on FastStream: committed after the handler, tried again, put aside, from the earliest record."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from schemas.ids import new_id
from schemas.tasks import TaskCancelled
from streams.codec import encode
from streams.consumer import GroupReader, Reader
from streams.errors import DecodeError
from streams.faststream_app import ATTEMPTS, follow, make_broker
from streams.producer import Producer
from streams.topics import DEAD_LETTERS, TASKS

pytestmark = pytest.mark.kafka


async def write_raw(kafka: str, value: bytes, headers) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(TASKS, value, b"k", headers=headers)


async def test_a_handler_gets_records_and_a_failing_one_is_tried_again_then_put_aside(kafka):
    group, good, bad = new_id(), new_id(), new_id()
    calls: list[str] = []
    done = asyncio.Event()
    broker = make_broker(kafka, "test-follower")

    @follow(broker, TASKS, group_id=group)
    async def handle(record: TaskCancelled) -> None:
        calls.append(record.task_id)
        if record.task_id == bad:
            raise ZeroDivisionError("cannot do this one")
        if record.task_id == good:
            done.set()

    async with Reader(kafka, [DEAD_LETTERS], source="test", start="end") as letters:
        async with Producer(kafka, source="test") as producer:
            at = await producer.send(TASKS, TaskCancelled(task_id=bad))
        # The same key, so the same partition: it is handled after the bad one.
        value, headers = encode(TaskCancelled(task_id=good), source="test")
        async with AIOKafkaProducer(bootstrap_servers=kafka) as raw:
            await raw.send_and_wait(TASKS, value, bad.encode(), headers=headers)
        async with broker:
            await broker.start()
            async with asyncio.timeout(60):
                await done.wait()
        (letter,) = [one.record for one in await letters.read_to_end()]
    assert calls.count(bad) == ATTEMPTS
    assert calls.count(good) == 1
    assert (letter.topic, letter.partition, letter.offset) == (TASKS, at.partition, at.offset)
    assert letter.reason == "ZeroDivisionError: cannot do this one"
    async with GroupReader(kafka, [TASKS], group_id=group, source="test") as reader:
        assert await reader.committed([(TASKS, at.partition)]) == {(TASKS, at.partition): at.offset + 2}


async def test_what_cannot_be_decoded_is_put_aside_at_once(kafka):
    group, good = new_id(), new_id()
    done = asyncio.Event()
    broker = make_broker(kafka, "test-decoder")

    @follow(broker, TASKS, group_id=group)
    async def handle(record: TaskCancelled) -> None:
        if record.task_id == good:
            done.set()

    _, headers = encode(TaskCancelled(task_id=good), source="test")
    async with Reader(kafka, [DEAD_LETTERS], source="test", start="end") as letters:
        await write_raw(kafka, b"\xff", headers)
        async with Producer(kafka, source="test") as producer:
            await producer.send(TASKS, TaskCancelled(task_id=good))
        async with broker:
            await broker.start()
            async with asyncio.timeout(60):
                await done.wait()
                written = []
                while not written:
                    written = await letters.poll(1.0)
    assert written[0].record.value == b"\xff"
    assert written[0].record.reason.startswith(DecodeError.__name__)


async def test_a_newer_schema_stops_the_subscriber_and_is_not_committed(kafka):
    group = new_id()
    handled: list[str] = []
    broker = make_broker(kafka, "test-newer")

    subscriber = follow(broker, TASKS, group_id=group)

    @subscriber
    async def handle(record: TaskCancelled) -> None:
        handled.append(record.task_id)

    value, headers = encode(TaskCancelled(task_id="newer"), source="test")
    newer = [(name, b"2.0" if name == "schema_version" else text) for name, text in headers]
    async with AIOKafkaProducer(bootstrap_servers=kafka) as raw:
        at = await raw.send_and_wait(TASKS, value, b"k", headers=newer)
        await raw.send_and_wait(TASKS, value, b"k", headers=headers)
    async with broker:
        await broker.start()
        async with asyncio.timeout(60):
            while subscriber.running:
                await asyncio.sleep(0.05)
    assert "newer" not in handled
    async with GroupReader(kafka, [TASKS], group_id=group, source="test") as reader:
        committed = (await reader.committed([(TASKS, at.partition)]))[TASKS, at.partition]
    assert committed is None or committed <= at.offset
