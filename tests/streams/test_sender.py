"""The sender on a real broker: lost answers, refused batches, a lot at once; and the bytes that it makes."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import new_id
from schemas.sessions import SessionClosed
from streams import link as link_module
from streams.consumer import Reader
from streams.deadlines import Deadlines
from streams.errors import KafkaUnavailable, RecordRefused
from streams.link import COMPRESSED_FROM, Link, compressed
from streams.producer import Producer
from streams.topics import MIB, SESSIONS

MESSAGE_TOO_LARGE = 10
OUT_OF_ORDER = 45
NOT_LEADER = 6


def closed(session_id: str, reason: str = "") -> SessionClosed:
    return SessionClosed(session_id=session_id, attempt=0, outcome="completed", reason=reason)


@pytest.mark.kafka
async def test_a_record_whose_answer_was_lost_is_written_once(kafka, monkeypatch):
    """The connection ends as the answer comes, three times in a row: the broker has the batch already."""
    session, lost, answered = new_id(), 0, Link.data_received

    def lose_some(self, data):
        nonlocal lost
        if lost < 3:
            lost += 1
            self.abort()
        else:
            answered(self, data)

    monkeypatch.setattr(Link, "data_received", lose_some)
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test") as producer,
    ):
        posted = [await producer.post(SESSIONS, closed(session, str(n))) for n in range(10)]
        written = await asyncio.gather(*posted)
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert lost == 3
    assert [one.record.reason for one in received] == [str(n) for n in range(10)]
    assert [one.offset for one in received] == [position.offset for position in written]


@pytest.mark.kafka
@pytest.mark.parametrize(("code", "error"), [(MESSAGE_TOO_LARGE, RecordRefused), (OUT_OF_ORDER, KafkaUnavailable)])
async def test_after_a_refused_batch_the_next_ones_are_written_in_order(kafka, monkeypatch, code, error):
    """The broker is told nothing of the refused batch's number, so it would refuse what follows under that identity."""
    session, requests, refused = new_id(), Link.request, []

    def refuse_the_first(self, batches, timeout_s):
        if not refused:
            refused.extend(batches)
            written = [link_module.Written(one.topic, one.partition, code, -1) for one in batches]
            asyncio.get_running_loop().call_soon(self._on_answer, self, written)
        else:
            requests(self, batches, timeout_s)

    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test") as producer,
    ):
        await producer.send(SESSIONS, closed(session, "before"))
        monkeypatch.setattr(Link, "request", refuse_the_first)
        first = await producer.post(SESSIONS, closed(session, "refused"))
        with pytest.raises(error, match=SESSIONS):
            await first
        for n in range(3):
            await producer.send(SESSIONS, closed(session, str(n)))
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert [one.record.reason for one in received] == ["before", "0", "1", "2"]


@pytest.mark.kafka
async def test_a_batch_that_is_to_be_sent_again_keeps_its_place(kafka, monkeypatch):
    session, requests, told = new_id(), Link.request, []

    def not_the_leader_once(self, batches, timeout_s):
        if not told:
            told.extend(batches)
            written = [link_module.Written(one.topic, one.partition, NOT_LEADER, -1) for one in batches]
            asyncio.get_running_loop().call_soon(self._on_answer, self, written)
        else:
            requests(self, batches, timeout_s)

    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test") as producer,
    ):
        await producer.send(SESSIONS, closed(session, "0"))
        monkeypatch.setattr(Link, "request", not_the_leader_once)
        first = await producer.post(SESSIONS, closed(session, "1"))
        while not told:
            await asyncio.sleep(0)
        later = [await producer.post(SESSIONS, closed(session, str(n))) for n in range(2, 6)]
        await asyncio.gather(first, *later)
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert [one.record.reason for one in received] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.kafka
async def test_many_at_once_wait_for_room_and_stay_in_the_order_of_the_calls(kafka):
    session, padding = new_id(), "x" * (MIB // 3)
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test") as producer,
    ):
        posting = [asyncio.create_task(producer.post(SESSIONS, closed(session, f"{n} {padding}"))) for n in range(12)]
        await asyncio.sleep(0)
        assert [task.done() for task in posting] == [n < 2 for n in range(12)]
        await asyncio.gather(*await asyncio.gather(*posting))
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert [int(one.record.reason.split()[0]) for one in received] == list(range(12))


@pytest.mark.kafka
async def test_what_is_posted_and_not_awaited_is_written_before_it_closes(kafka):
    session = new_id()
    async with Reader(kafka, [SESSIONS], source="test", start="end") as reader:
        async with Producer(kafka, source="test") as producer:
            for n in range(20):
                await producer.post(SESSIONS, closed(session, str(n)))
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert [one.record.reason for one in received] == [str(n) for n in range(20)]


@pytest.mark.kafka
async def test_a_wait_that_is_cancelled_leaves_the_record_in_its_place(kafka):
    session = new_id()
    async with (
        Reader(kafka, [SESSIONS], source="test", start="end") as reader,
        Producer(kafka, source="test") as producer,
    ):
        (await producer.post(SESSIONS, closed(session, "0"))).cancel()
        await producer.send(SESSIONS, closed(session, "1"))
        received = [one for one in await reader.read_to_end() if one.record.session_id == session]
    assert [one.record.reason for one in received] == ["0", "1"]


@pytest.mark.kafka
async def test_a_producer_that_is_not_entered_says_so(kafka):
    with pytest.raises(RuntimeError, match="async with"):
        await Producer(kafka, source="test").send(SESSIONS, closed("s"))


RECORDS = st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=9000)), min_size=1, max_size=8)


@given(RECORDS, st.integers(0, 2**31 - 1))
def test_a_compressed_batch_holds_the_same_records_under_the_same_number(records, sequence):
    builder = DefaultRecordBatchBuilder(2, 0, 0, 7, 1, sequence, 2**31 - 1)
    for offset, (key, value) in enumerate(records):
        builder.append(offset, 1, key, value, [("name", b"header")])
    plain = builder.build()
    packed = compressed(plain)
    assert len(packed) <= len(plain)
    assert len(packed) < len(plain) or len(plain) < COMPRESSED_FROM or packed is plain
    batch = DefaultRecordBatch(bytes(packed))
    assert batch.validate_crc()
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 1, sequence)
    assert [(one.key, one.value, one.headers) for one in batch] == [(*one, [("name", b"header")]) for one in records]


async def test_only_what_is_late_gets_the_error():
    deadlines = Deadlines(0.01, lambda doing: KafkaUnavailable(f"late: {doing}"))
    loop = asyncio.get_running_loop()
    first, second, third = (loop.create_future() for _ in range(3))
    for future, name in ((first, "first"), (second, "second"), (third, "third")):
        deadlines.watch(future, name)
    second.set_result("in time")
    for future, name in ((first, "first"), (third, "third")):
        with pytest.raises(KafkaUnavailable, match=f"late: {name}"):
            await future
    assert await second == "in time"


async def test_deadlines_that_are_closed_end_nothing():
    deadlines = Deadlines(0.0, KafkaUnavailable)
    future = asyncio.get_running_loop().create_future()
    deadlines.watch(future, "anything")
    deadlines.close()
    await asyncio.wait([future], timeout=0.01)
    assert not future.done()
