"""Sends records to the leaders of their partitions: idempotent, in order, and cheap.

aiokafka finds the leaders (its client's metadata) and the producer's identity; batches and requests are made here,
because a task, a timer and several futures for each request cost more than all the rest. While a request to a broker
is under way, what comes in gathers in batches; so an idle sender sends at once, and a busy one sends a lot at a time.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import DuplicateSequenceNumber, KafkaError, NoError, for_code
from aiokafka.partitioner import murmur2
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from streams.link import Link, Sent, Written, compressed
from streams.topics import TABLE

Headers = list[tuple[str, bytes]]

BATCH_BYTES = 2**20
REQUEST_BYTES = 16 * 2**20
"""After so much no more batches are added to a request. A broker takes 100 MiB."""
REQUEST_S = 15.0
RETRY_S = 0.1
NO_TIMEOUT_MS = 2**31 - 1
MAX_BYTES = 2**31 - 1
HEADERS_BYTES = 300

log = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True, order=True):
    """Where a record was written."""

    topic: str
    partition: int
    offset: int


class Batch:
    """Records of one partition. Once packed it takes no more, and is sent again as it is until it is answered."""

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.size = 0
        self.acknowledged: list[asyncio.Future[Position]] = []
        self.packed: bytes | bytearray | None = None
        self.drained: asyncio.Future[None] | None = None
        """Ends when the batch is packed, or failed; made where somebody waits for that."""
        self._records: list[tuple[bytes, bytes, Headers]] = []

    def add(self, key: bytes, value: bytes, headers: Headers, acknowledged: asyncio.Future[Position]) -> None:
        self._records.append((key, value, headers))
        self.acknowledged.append(acknowledged)
        self.size += len(key) + len(value) + HEADERS_BYTES

    def pack(self, identity: tuple[int, int], sequence: int) -> None:
        builder = DefaultRecordBatchBuilder(2, 0, 0, *identity, sequence, MAX_BYTES)
        for offset, (key, value, headers) in enumerate(self._records):
            builder.append(offset, None, key, value, headers)
        self.packed = compressed(builder.build())
        self._records.clear()
        self._drain()

    def written(self, offset: int) -> None:
        topic, partition = self.partition
        for number, acknowledged in enumerate(self.acknowledged):
            if not acknowledged.done():
                acknowledged.set_result(Position(topic, partition, offset + number))

    def failed(self, error: Exception) -> None:
        for acknowledged in self.acknowledged:
            if not acknowledged.done():
                acknowledged.set_exception(copy.copy(error))  # each gets a traceback of its own
        self._drain()

    def _drain(self) -> None:
        if self.drained is not None and not self.drained.done():
            self.drained.set_result(None)


class Sender:
    """``refused`` turns what the broker says of a batch of a topic into the error that its records raise.

    Invariants: of one partition at most one batch is under way, and batches are numbered in the order of ``put``, so
    that a batch that is sent again is not written twice and none overtakes another. After a batch that the broker
    refuses, or whose number it does not expect, the producer goes on with a fresh identity, numbered from 0.
    """

    def __init__(self, bootstrap: str, *, client_id: str, refused: Callable[[Exception, str], Exception]) -> None:
        self._client_id = client_id
        self._refused = refused
        self._client = AIOKafkaClient(
            bootstrap_servers=bootstrap, client_id=client_id, request_timeout_ms=int(REQUEST_S * 1000)
        )
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[str, list[TopicPartition]] = {}
        self._queues: dict[TopicPartition, deque[Batch]] = {}
        self._identity: tuple[int, int] | None = None
        self._sequences: dict[TopicPartition, int] = {}
        self._links: dict[int, Link] = {}
        self._busy: dict[int, dict[TopicPartition, Batch]] = {}
        self._asked_at: dict[int, float] = {}
        self._watching: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = False
        self._idle: asyncio.Future[None] | None = None
        self._closed = False
        self.answered_at = 0.0
        """The loop's time when a broker last acknowledged something."""

    async def start(self) -> None:
        """Connects, learns of the topics that exist, and gets an identity."""
        await self._client.bootstrap()
        await self._client.force_metadata_update()
        if known := self._client.cluster.topics() & TABLE.keys():
            self._client.set_topics(known)
        for topic in known:
            await self.find(topic)
        await self._identify()

    def knows(self, topic: str) -> bool:
        return topic in self._partitions

    async def find(self, topic: str) -> None:
        """Learns of the partitions of ``topic``. Raises KafkaError when it does not exist."""
        numbers = await self._client._wait_on_metadata(topic)
        self._partitions[topic] = [TopicPartition(topic, number) for number in sorted(numbers)]

    def put(
        self, topic: str, key: bytes, value: bytes, headers: Headers
    ) -> tuple[asyncio.Future[Position], asyncio.Future[None] | None]:
        """Gives the record its place: the acknowledgement, and what to wait for first while much is unsent."""
        partitions = self._partitions[topic]
        partition = partitions[(_hash(key) & 0x7FFFFFFF) % len(partitions)]
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = deque()
        if not queue or queue[-1].packed is not None or queue[-1].size + len(value) > BATCH_BYTES:
            queue.append(Batch(partition))
        acknowledged: asyncio.Future[Position] = self._loop.create_future()
        queue[-1].add(key, value, headers, acknowledged)
        self._wake()
        if len(queue) == 1 or queue[-2].packed is not None:
            return acknowledged, None
        if queue[-2].drained is None:
            queue[-2].drained = self._loop.create_future()
        return acknowledged, queue[-2].drained

    async def close(self, timeout_s: float) -> bool:
        """Sends what is left, for at most ``timeout_s``, and closes; whether all was acknowledged."""
        self._idle = self._loop.create_future()
        self._wake()
        await asyncio.wait([self._idle], timeout=timeout_s)
        self._closed = True
        left = [batch for queue in self._queues.values() for batch in queue]
        left += [batch for batches in self._busy.values() for batch in batches.values()]
        for timer in (self._watching, self._looking):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.abort()
        await self._client.close()
        for batch in left:
            batch.failed(self._refused(KafkaError("the producer was closed"), batch.partition.topic))
        return not left

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Sends what can be sent: to each broker that has no request under way, a batch of each of its partitions."""
        self._woken = False
        if self._idle is not None and not self._queues and not self._busy and not self._idle.done():
            self._idle.set_result(None)
        if self._closed or self._identity is None:
            return
        ready: dict[int, list[TopicPartition]] = {}
        leaderless = False
        for partition in self._queues:
            leader = self._client.cluster.leader_for_partition(partition)
            if leader is None or leader < 0:
                leaderless = True
            elif leader not in self._busy:
                ready.setdefault(leader, []).append(partition)
        for node, partitions in ready.items():
            self._send(node, partitions)
        if leaderless and self._looking is None:
            self._client.force_metadata_update()
            self._looking = self._loop.call_later(RETRY_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._wake()

    def _send(self, node: int, partitions: list[TopicPartition]) -> None:
        link = self._links.get(node)
        if link is None:
            self._busy[node] = {}
            self._run(self._connect(node))
            return
        under_way = {one for batches in self._busy.values() for one in batches} if self._busy else ()
        batches: dict[TopicPartition, Batch] = {}
        size = 0
        for partition in partitions:
            if partition in under_way:  # at its former leader
                continue
            batches[partition] = batch = self._next(partition)
            size += batch.size
            if size > REQUEST_BYTES:
                break
        if not batches:
            return
        self._busy[node] = batches
        self._asked_at[node] = self._loop.time()
        if self._watching is None:
            self._watching = self._loop.call_later(REQUEST_S, self._watch)
        link.request([Sent(one.topic, one.partition, batch.packed or b"") for one, batch in batches.items()], REQUEST_S)

    def _next(self, partition: TopicPartition) -> Batch:
        queue = self._queues[partition]
        batch = queue.popleft()
        if not queue:
            del self._queues[partition]
        if batch.packed is None and self._identity is not None:
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = (sequence + len(batch.acknowledged)) & 0x7FFFFFFF
            batch.pack(self._identity, sequence)
        return batch

    def _answered(self, node: int, written: list[Written]) -> None:
        batches = self._busy.pop(node, {})
        again = []
        for topic, partition, code, offset in written:
            batch = batches.pop(TopicPartition(topic, partition), None)
            if batch is None:
                continue
            error = for_code(code)
            if error is NoError or error is DuplicateSequenceNumber:
                batch.written(offset)
                self.answered_at = self._loop.time()
            elif error.retriable:
                again.append(batch)
            else:
                self._refuse(batch, error())
        again += batches.values()
        if again:
            self._try_again(node, again)
        else:
            self._wake()  # after those who were waiting for these records: they may have more to send

    def _refuse(self, batch: Batch, error: KafkaError) -> None:
        """The batch leaves a hole in the numbers, or the broker counts otherwise: begin anew."""
        batch.failed(self._refused(error, batch.partition.topic))
        if self._identity is not None:
            self._identity = None
            self._run(self._identify())

    def _try_again(self, node: int, batches: list[Batch]) -> None:
        """In their places; after a while, and with fresh metadata."""
        for batch in batches:
            self._queues.setdefault(batch.partition, deque()).appendleft(batch)
        self._busy[node] = {}
        self._client.force_metadata_update()
        self._loop.call_later(RETRY_S, self._free, node)

    def _free(self, node: int) -> None:
        self._busy.pop(node, None)
        self._wake()

    def _lost(self, node: int, link: Link) -> None:
        if self._links.get(node) is not link:
            return
        del self._links[node]
        if not self._closed and (batches := self._busy.get(node)):
            self._try_again(node, list(batches.values()))

    def _watch(self) -> None:
        """Gives up a connection on which a request is unanswered for too long. One timer for all of them."""
        now, first = self._loop.time(), None
        for node, batches in self._busy.items():
            if not batches or node not in self._links:
                continue
            if now - self._asked_at[node] >= REQUEST_S:
                self._links[node].abort()
            else:
                first = min(first or now, self._asked_at[node])
        self._watching = None if first is None else self._loop.call_at(first + REQUEST_S, self._watch)

    async def _connect(self, node: int) -> None:
        broker = self._client.cluster.broker_metadata(node)
        try:
            if broker is None:
                raise ConnectionError(f"broker {node} is not in the metadata")
            async with asyncio.timeout(REQUEST_S):
                _, link = await self._loop.create_connection(
                    lambda: Link(
                        self._client_id,
                        lambda _, written: self._answered(node, written),
                        lambda lost: self._lost(node, lost),
                    ),
                    broker.host,
                    broker.port,
                )
            if link.lost:
                raise ConnectionError("it closed the connection at once")
        except OSError as error:
            log.warning("broker %s cannot be reached, trying again: %s", node, error)
            self._try_again(node, [])
        else:
            self._links[node] = link
            self._free(node)

    async def _identify(self) -> None:
        """Gets a fresh identity, which no batch has used."""
        while self._identity is None:
            node = self._client.get_random_node()
            try:
                answer = await self._client.send(node, InitProducerIdRequest(None, NO_TIMEOUT_MS))
                if answer.error_code == 0:
                    self._sequences.clear()
                    self._identity = (answer.producer_id, answer.producer_epoch)
                    break
                error = for_code(answer.error_code)()
            except KafkaError as fault:
                error = fault
            log.info("no identity for the producer yet: %r", error)
            await asyncio.sleep(RETRY_S)
            await self._client.force_metadata_update()
        self._wake()

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@lru_cache(maxsize=4096)
def _hash(key: bytes) -> int:
    return int(murmur2(key))
