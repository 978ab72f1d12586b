"""Producer, readers, dead letters and admin, on a real broker."""

from __future__ import annotations

import asyncio
import os

import pytest
from aiokafka import AIOKafkaProducer
from record_strategies import example_of

from schemas.ids import new_id
from schemas.record import SCHEMA_VERSION
from schemas.sessions import HarnessExited, SessionClosed
from schemas.tasks import TaskCancelled
from streams.admin import create_topics, topic_lag, wait_ready
from streams.codec import encode, record_types
from streams.consumer import GroupReader, Reader, read_last
from streams.errors import KafkaUnavailable, NewerSchemaError, OffsetLost, RecordRefused, StreamError
from streams.producer import Producer
from streams.topics import BATCHES, DEAD_LETTERS, MIB, SESSIONS, TABLE, TASKS, WEIGHTS

pytestmark = pytest.mark.kafka


def closed(session_id: str, reason: str = "") -> SessionClosed:
    return SessionClosed(session_id=session_id, attempt=0, outcome="completed", reason=reason)


async def write_raw(kafka: str, topic: str, value: bytes, headers, key: bytes = b"k") -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(topic, value, key, headers=headers)


@pytest.mark.parametrize("topic", sorted(TABLE))
async def test_every_record_type_goes_through_kafka(kafka, topic):
    records = [example_of(kind) for kind in record_types(topic)]
    async with Reader(kafka, [topic], source="test", start="end") as reader:
        async with Producer(kafka, source="test") as producer:
            written = [await producer.send(topic, record) for record in records]
        received = {(one.topic, one.partition, one.offset): one for one in await reader.read_to_end()}
    for position, record in zip(written, records, strict=True):
        one = received[position.topic, position.partition, position.offset]
        assert one.record == record
        assert one.key == TABLE[topic].key(record)


async def test_records_of_one_key_stay_in_the_order_in_which_they_were_posted(kafka):
    sessions = [new_id() for _ in range(8)]
    async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
        async with Producer(kafka, source="test") as producer:
            posted = [await producer.post(SESSIONS, closed(s, str(n))) for n in range(100) for s in sessions]
            await asyncio.gather(*posted)
        received = await reader.read_to_end()
    for session in sessions:
        mine = [one for one in received if one.record.session_id == session]
        assert [one.record.reason for one in mine] == [str(n) for n in range(100)]
        assert len({one.partition for one in mine}) == 1


async def test_the_positions_of_a_reader_are_where_another_goes_on(kafka):
    session = new_id()
    async with Producer(kafka, source="test") as producer:
        async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
            for n in range(10):
                await producer.send(SESSIONS, closed(session, str(n)))
            first = await reader.poll(10, max_records=4)
            positions = reader.positions()
        await producer.send(SESSIONS, closed(session, "10"))
    async with Reader(kafka, [SESSIONS], source="test", start=positions) as reader:
        rest = await reader.read_to_end()
    assert [one.record.reason for one in first + rest] == [str(n) for n in range(11)]
    assert len(first) <= 4


async def test_a_poll_without_records_ends_empty_and_a_partition_that_start_leaves_out_is_read_whole(kafka):
    async with Reader(kafka, [BATCHES], source="test", start="end") as reader:
        assert await reader.poll(0.05) == []
    async with Reader(kafka, [BATCHES], source="test", start={}) as whole, Producer(kafka, source="test") as producer:
        position = await producer.send(BATCHES, example_of(record_types(BATCHES)[2]))
        assert (await whole.read_to_end())[-1].offset == position.offset


async def test_skipped_types_are_neither_decoded_nor_returned_but_passed(kafka):
    session = new_id()
    async with Reader(
        kafka, [SESSIONS], source="test", start="end", skip_types=frozenset({"session.exited"}), dead_letters=True
    ) as reader:
        _, headers = encode(
            HarnessExited(session_id=session, attempt=0, exit_code=0, timed_out=False, seconds=1.0), source="test"
        )
        await write_raw(kafka, SESSIONS, b"not even JSON", headers)
        async with Producer(kafka, source="test") as producer:
            await producer.send(SESSIONS, closed(session))
        assert [one.record.session_id for one in await reader.read_to_end()] == [session]


async def test_a_large_record_of_random_bytes_goes_through(kafka):
    session, noise = new_id(), os.urandom(12 * MIB).hex()
    async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
        async with Producer(kafka, source="test") as producer:
            await producer.send(SESSIONS, closed(session, noise))
            await producer.send(SESSIONS, closed(session, "after it"))
        received = await reader.read_to_end()
    assert [one.record.reason for one in received] == [noise, "after it"]


async def test_a_record_larger_than_its_topic_takes_is_refused_by_size(kafka):
    async with Producer(kafka, source="test") as producer:
        with pytest.raises(RecordRefused, match=rf"{TASKS} takes {TABLE[TASKS].max_bytes}"):
            await producer.send(TASKS, TaskCancelled(task_id="t", reason="x" * (9 * MIB)))
        await producer.send(TASKS, TaskCancelled(task_id="t"))


async def test_a_record_of_another_topic_is_refused(kafka):
    async with Producer(kafka, source="test") as producer:
        with pytest.raises(RecordRefused, match="SessionClosed"):
            await producer.send(TASKS, closed("s"))


async def test_a_bad_message_is_put_aside_with_its_bytes_and_the_rest_is_read(kafka):
    group, session = new_id(), new_id()
    async with Reader(kafka, [DEAD_LETTERS], source="test", start="end") as letters:
        async with GroupReader(kafka, [SESSIONS], group_id=group, source="test-group") as reader:
            while not reader.assignment():
                await reader.poll(0.1)
            await drain(reader)
            headers = [("schema_version", SCHEMA_VERSION.encode()), ("ce_type", b"session.closed")]
            await write_raw(kafka, SESSIONS, b"\xff{broken", headers, key=session.encode())
            async with Producer(kafka, source="test") as producer:
                good = await producer.send(SESSIONS, closed(session))
            assert [one.record.session_id for one in await reader.poll(10)] == [session]
        letter = (await letters.read_to_end())[-1].record
    assert (letter.service, letter.topic, letter.partition) == ("test-group", SESSIONS, good.partition)
    assert letter.offset == good.offset - 1
    assert (letter.key, letter.value, letter.headers) == (session.encode(), b"\xff{broken", headers)
    assert "JSON" in letter.reason


async def test_a_newer_schema_stops_the_reader_and_is_not_passed_over(kafka):
    async with Reader(kafka, [WEIGHTS], source="test", start="end") as reader:
        value, headers = encode(example_of(record_types(WEIGHTS)[0]), source="test")
        newer = [(name, b"2.0" if name == "schema_version" else text) for name, text in headers]
        before = reader.positions()
        await write_raw(kafka, WEIGHTS, value, newer)
        for _ in range(2):
            with pytest.raises(NewerSchemaError, match=r"2\.0"):
                await reader.read_to_end()
        assert reader.positions() == before


async def test_a_start_beyond_the_log_is_an_error_not_a_reset(kafka):
    async with Reader(kafka, [BATCHES], source="test", start={(BATCHES, 0): 10**9}) as reader:
        with pytest.raises(OffsetLost, match=BATCHES):
            await reader.poll(10)


async def drain(reader) -> list:
    received = []
    while more := await reader.poll(0.5):
        received += more
    return received


async def test_what_a_member_did_not_commit_is_delivered_again(kafka):
    group, session = new_id(), new_id()
    async with Producer(kafka, source="test") as producer:
        written = [await producer.send(SESSIONS, closed(session, str(n))) for n in range(6)]
    partition = (SESSIONS, written[0].partition)

    async def mine(reader, until: str) -> list:
        received = []
        while not received or received[-1].record.reason != until:
            received += [one for one in await reader.poll(5) if one.record.session_id == session]
        return received

    async with GroupReader(kafka, [SESSIONS], group_id=group, source="test") as first:
        await mine(first, "5")
        await first.commit({partition: written[3].offset})
        assert (await first.committed([partition])) == {partition: written[3].offset}
    async with GroupReader(kafka, [SESSIONS], group_id=group, source="test") as second:
        again = await mine(second, "5")
    assert [one.offset for one in again] == [position.offset for position in written[3:]]


async def test_members_share_the_partitions_and_hear_of_it(kafka):
    group, heard = new_id(), []

    async def revoked(partitions):
        heard.append(("first revoked", len(partitions)))

    async with GroupReader(
        kafka,
        [SESSIONS],
        group_id=group,
        source="first",
        on_revoked=revoked,
        on_assigned=lambda partitions: heard.append(("first assigned", len(partitions))),
    ) as first:
        while len(first.assignment()) < 6:
            await first.poll(0.1)
        async with GroupReader(kafka, [SESSIONS], group_id=group, source="second") as second:
            while len(second.assignment()) != 3:
                await asyncio.gather(first.poll(0.1), second.poll(0.1))
            assert first.assignment().isdisjoint(second.assignment())
    assert [event for event in heard if event[1]][:3] == [
        ("first assigned", 6),
        ("first revoked", 6),
        ("first assigned", 3),
    ]


async def test_a_callback_that_fails_stops_the_reader(kafka):
    def fails(partitions):
        raise ZeroDivisionError

    async with Producer(kafka, source="test") as producer:
        await producer.send(SESSIONS, closed(new_id()))
    async with GroupReader(kafka, [SESSIONS], group_id=new_id(), source="test", on_assigned=fails) as reader:
        with pytest.raises(StreamError, match="on_assigned has failed"):
            while True:
                await reader.poll(1)


async def test_the_last_records_of_a_topic(kafka):
    session = new_id()
    async with Producer(kafka, source="test") as producer:
        for n in range(5):
            last = await producer.send(SESSIONS, closed(session, str(n)))
    of_partition = [one for one in await read_last(kafka, SESSIONS, 3) if one.partition == last.partition]
    assert [one.record.reason for one in of_partition] == ["2", "3", "4"]


async def test_lags_are_counted_by_group(kafka):
    group, session = new_id(), new_id()
    async with Producer(kafka, source="test") as producer:
        last = [await producer.send(SESSIONS, closed(session, str(n))) for n in range(5)][-1]
    async with GroupReader(kafka, [SESSIONS], group_id=group, source="test") as reader:
        while (SESSIONS, last.partition) not in reader.assignment():
            await reader.poll(0.1)
        await reader.commit({(SESSIONS, last.partition): last.offset - 1})
    lags = {lag.topic: lag for lag in await topic_lag(kafka)}
    assert set(lags) == set(TABLE)
    assert lags[SESSIONS].group_lags[group] == 2
    assert {topic: len(lag.partitions) for topic, lag in lags.items()} == {
        topic: spec.partitions for topic, spec in TABLE.items()
    }
    assert lags[SESSIONS].partitions[last.partition].end == last.offset + 1


async def test_creating_the_topics_again_changes_nothing(kafka):
    assert await create_topics(kafka) == []


async def test_nobody_listening_is_said_with_the_address_and_what_to_do(unused_tcp_port):
    nowhere = f"127.0.0.1:{unused_tcp_port}"
    with pytest.raises(KafkaUnavailable, match=rf"{nowhere}.*python -m streams.broker"):
        await wait_ready(nowhere, deadline_s=0.2)
    with pytest.raises(KafkaUnavailable, match=nowhere):
        async with Producer(nowhere, source="test"):
            pass
    with pytest.raises(KafkaUnavailable, match=nowhere):
        async with Reader(nowhere, [TASKS], source="test", start="end"):
            pass
    with pytest.raises(KafkaUnavailable, match=nowhere):
        await create_topics(nowhere)
