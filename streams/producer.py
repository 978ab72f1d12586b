"""Writing records: acknowledged by all replicas, idempotent, in order per key, and every wait has a deadline.

An idempotent record is tried again for ever, but what waits for one that is not acknowledged within ``DEADLINE_S``
gets KafkaUnavailable. It may still be written later, in its place in the order. Transactions are aiokafka's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.record import Record
from streams.codec import belongs, encode
from streams.deadlines import Deadlines
from streams.errors import Fenced, KafkaUnavailable, RecordRefused, StreamError, named
from streams.sender import Position, Sender
from streams.topics import MIB, TABLE

__all__ = ["Fenced", "KafkaUnavailable", "Position", "Producer", "RecordRefused"]

T = TypeVar("T")

DEADLINE_S = 30.0
CLOSE_UNANSWERED_S = 1.0
"""How long closing waits for a broker that has just not answered: what is still unsent was reported as such."""
TRANSACTION_TIMEOUT_MS = 45_000
"""After this the broker aborts the transaction of a killed producer, which until then holds back committed readers."""

log = logging.getLogger(__name__)


class Producer:
    """An async context manager. With ``transactional_id``, records are sent inside ``transaction()`` only.

    Invariants: a record is acknowledged once, however often it was retried; records of one key stand in the order in
    which ``send`` and ``post`` were called; a transaction is committed only if each of its records was acknowledged.
    """

    def __init__(
        self, bootstrap: str, *, source: str, transactional_id: str | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        self._bootstrap = bootstrap
        self._source = source
        self._transactional_id = transactional_id
        self._deadline_s = deadline_s
        self._sender: Sender | None = None
        self._deadlines: Deadlines | None = None
        self._kafka: AIOKafkaProducer | None = None
        self._in_transaction: list[asyncio.Future[Position]] = []
        self._broken: StreamError | None = None
        self._unanswered = False
        self._late_at = -1.0

    async def __aenter__(self) -> Self:
        try:
            if self._transactional_id is None:
                self._sender = Sender(self._bootstrap, client_id=self._source, refused=self._refused)
                self._deadlines = Deadlines(self._deadline_s, self._late)
                await self._within(self._sender.start(), "connecting")
            else:
                self._kafka = self._transactional(self._transactional_id)
                await self._within(self._kafka.start(), "connecting")
        except StreamError:
            await self._stop()
            raise
        return self

    def _transactional(self, transactional_id: str) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            client_id=self._source,
            acks="all",
            enable_idempotence=True,
            compression_type="zstd",
            transactional_id=transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            max_request_size=max(spec.max_bytes for spec in TABLE.values()) + MIB,
            max_batch_size=MIB,
            request_timeout_ms=15_000,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def send(self, topic: str, record: Record) -> Position:
        """Writes ``record`` and waits for the acknowledgement.

        Raises KafkaUnavailable, Fenced, or RecordRefused (wrong topic, too large, a float that is not finite).
        """
        return await (await self.post(topic, record))

    async def post(self, topic: str, record: Record) -> asyncio.Future[Position]:
        """Puts ``record`` into its place in the order; the future ends with the acknowledgement, or raises as ``send``.

        Waits while a mebibyte of the same partition is unsent, so what is in memory has a limit.
        """
        if topic not in TABLE or not belongs(topic, record):
            raise RecordRefused(f"{topic or 'no topic'} does not carry {type(record).__name__}")
        value, headers = encode(record, source=self._source)
        if len(value) > TABLE[topic].max_bytes:
            raise RecordRefused(
                f"a {type(record).__name__} of {len(value)} bytes: {topic} takes {TABLE[topic].max_bytes}"
            )
        key = TABLE[topic].key(record).encode()
        doing = f"writing a {type(record).__name__} to {topic}"
        if self._transactional_id is not None:
            return await self._post_in_transaction(topic, key, value, headers, doing)
        sender, deadlines = self._sending()
        if not sender.knows(topic):
            await self._within(sender.find(topic), doing)
        acknowledged, room = sender.put(topic, key, value, headers)
        deadlines.watch(acknowledged, doing)
        if room is not None:
            waited_for: tuple[asyncio.Future[Any], ...] = (room, acknowledged)
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        return acknowledged

    async def _post_in_transaction(
        self, topic: str, key: bytes, value: bytes, headers: list[tuple[str, bytes]], doing: str
    ) -> asyncio.Future[Position]:
        written = await self._within(self._client().send(topic, value, key, headers=headers), doing)
        acknowledged = asyncio.ensure_future(self._acknowledged(written, doing))
        self._in_transaction.append(acknowledged)
        return acknowledged

    async def _acknowledged(self, written: asyncio.Future[Any], doing: str) -> Position:
        metadata = await self._within(asyncio.shield(written), doing)
        return Position(metadata.topic, metadata.partition, metadata.offset)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Everything sent inside becomes visible at once at the end, or never if the block raises.

        Raises KafkaUnavailable or Fenced; after either this producer is of no more use.
        """
        client = self._client()
        await self._within(client.begin_transaction(), "beginning a transaction")
        self._in_transaction.clear()
        committed = False
        try:
            yield
            await asyncio.gather(*self._in_transaction)
            await self._within(client.commit_transaction(), "committing a transaction")
            committed = True
        finally:
            if not committed and self._broken is None:
                await self._within(client.abort_transaction(), "aborting a transaction")

    async def send_offsets(self, offsets: Mapping[tuple[str, int], int], group_id: str) -> None:
        """Commits the group's next positions together with the open transaction.

        They are in their place a moment after the transaction: a service that starts opens its Producer first, which
        waits for that, and then its GroupReader.
        """
        named_offsets = {TopicPartition(*partition): offset for partition, offset in offsets.items()}
        if named_offsets:
            sending = self._client().send_offsets_to_transaction(named_offsets, group_id)
            await self._within(sending, f"committing offsets of {group_id}")

    async def _within(self, waiting: Awaitable[T], doing: str) -> T:
        """``waiting`` within the deadline, its errors named. A transactional producer does not outlive an error."""
        try:
            async with asyncio.timeout(self._deadline_s):
                result = await waiting
            self._unanswered = False
            return result
        except (KafkaError, OSError, AssertionError) as error:
            failed = named(error, self._bootstrap, f"{self._source}: {doing}")
            self._unanswered = isinstance(failed, KafkaUnavailable)
            if self._transactional_id is not None and not isinstance(failed, RecordRefused):
                self._broken = failed
            raise failed from error

    def _client(self) -> AIOKafkaProducer:
        if self._broken is not None:
            raise self._broken
        if self._kafka is None:
            raise RuntimeError("a Producer is used inside `async with`")
        return self._kafka

    def _sending(self) -> tuple[Sender, Deadlines]:
        if self._sender is None or self._deadlines is None:
            raise RuntimeError("a Producer is used inside `async with`")
        return self._sender, self._deadlines

    def _refused(self, error: Exception, topic: str) -> StreamError:
        return named(error, self._bootstrap, f"{self._source}: writing to {topic}")

    def _late(self, doing: str) -> StreamError:
        self._late_at = asyncio.get_running_loop().time()
        return named(TimeoutError(), self._bootstrap, f"{self._source}: {doing}")

    async def _stop(self) -> None:
        sender, self._sender = self._sender, None
        kafka, self._kafka = self._kafka, None
        if self._deadlines is not None:
            self._deadlines.close()
        try:
            if sender is not None:
                unanswered = self._unanswered or self._late_at > sender.answered_at
                if not await sender.close(CLOSE_UNANSWERED_S if unanswered else self._deadline_s):
                    log.warning("Kafka at %s: %s closed with unsent records", self._bootstrap, self._source)
            if kafka is not None:
                async with asyncio.timeout(CLOSE_UNANSWERED_S if self._unanswered else self._deadline_s):
                    await kafka.stop()
        except (KafkaError, OSError) as error:
            log.warning("Kafka at %s: %s did not close cleanly: %r", self._bootstrap, self._source, error)
