"""What all readers share: connecting, polling within deadlines, decoding, and putting aside what is no record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from streams.codec import decode, record_type
from streams.dead_letters import put_aside, shout
from streams.errors import DecodeError, KafkaUnavailable, StreamError, named
from streams.topics import DEAD_LETTERS, MIB

T = TypeVar("T")
DEADLINE_S = 30.0
SILENCE_S = 60.0
"""A broker that has answered no fetch for so long while somebody waits is unavailable."""
SLICE_S = 0.1
"""How long one wait for records lasts where an end or a deadline has to be looked at."""

log = logging.getLogger(__name__)


class Received(msgspec.Struct, frozen=True):
    """A record and where it stood."""

    topic: str
    partition: int
    offset: int
    key: str | None
    record: Any


class Polling:
    """The base of the readers, which say how they take up their partitions (``_begin``)."""

    def __init__(
        self,
        bootstrap: str,
        topics: Collection[str],
        *,
        source: str,
        skip_types: frozenset[str],
        dead_letters: bool,
        **options: Any,
    ) -> None:
        self._bootstrap = bootstrap
        self._topics = sorted(topics)
        self._source = source
        self._skip_types = skip_types
        self._dead_letters = dead_letters
        self._options = options
        self._kafka: AIOKafkaConsumer | None = None
        self._failed: StreamError | None = None
        self._silent_s = 0.0
        self._answered = 0

    async def __aenter__(self) -> Self:
        self._kafka = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            client_id=self._source,
            enable_auto_commit=False,
            # Soft limits: a larger first message is still returned whole.
            fetch_max_bytes=32 * MIB,
            max_partition_fetch_bytes=4 * MIB,
            fetch_max_wait_ms=500,
            request_timeout_ms=15_000,
            **self._options,
        )
        try:
            await self._within(self._kafka.start(), "connecting")
            await self._begin()
        except StreamError:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def poll(self, timeout_s: float = 1.0, max_records: int = 500) -> list[Received]:
        """The next records, at most ``max_records``, in order within each partition; [] after ``timeout_s``.

        Raises KafkaUnavailable after a minute without an answer, OffsetLost, or NewerSchemaError; after any of these
        a reader only raises it again, so that nothing is passed over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            received = await self._received(left_s, max_records)
            if received or time.monotonic() >= deadline:
                return received

    async def _begin(self) -> None:
        """Takes up the partitions."""
        raise NotImplementedError

    async def _received(self, timeout_s: float, max_records: int) -> list[Received]:
        client, started = self._client(), time.monotonic()
        try:
            batches = await self._fetched(client, timeout_s, max_records)
            self._listen_for_silence(client, time.monotonic() - started, batches)
            messages = [message for batch in (batches or {}).values() for message in batch]
            decoded = [await self._decoded(message) for message in messages]
        except StreamError as error:
            self._failed = error
            raise
        return [one for one in decoded if one is not None]

    async def _fetched(
        self, client: AIOKafkaConsumer, timeout_s: float, max_records: int
    ) -> dict[TopicPartition, list[ConsumerRecord]] | None:
        """None where the client is stuck: it waits for the group without looking at its own timeout."""
        try:
            async with asyncio.timeout(timeout_s + SLICE_S):
                return await client.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except TimeoutError:
            return None
        except (KafkaError, OSError) as error:
            raise named(error, self._bootstrap, f"{self._source}: reading {', '.join(self._topics)}") from error

    def _listen_for_silence(
        self, client: AIOKafkaConsumer, waited_s: float, batches: dict[TopicPartition, list[ConsumerRecord]] | None
    ) -> None:
        assigned = client.assignment()
        answered = max((client.last_poll_timestamp(tp) or 0 for tp in assigned), default=0)
        idle = batches is not None and not assigned
        if batches or idle or answered != self._answered:
            self._silent_s, self._answered = 0.0, answered
            return
        self._silent_s += waited_s
        if self._silent_s > SILENCE_S:
            raise KafkaUnavailable(
                f"Kafka at {self._bootstrap}: {self._source} has had no answer for {SILENCE_S:.0f} s; "
                "check that the broker runs, then start this again"
            )

    async def _decoded(self, message: ConsumerRecord) -> Received | None:
        if self._skip_types and record_type(message.headers) in self._skip_types:
            return None
        try:
            record = decode(message.topic, message.value, message.headers)
        except DecodeError as error:
            shout(message, service=self._source, reason=str(error))
            if self._dead_letters and message.topic != DEAD_LETTERS:
                await put_aside(self._bootstrap, message, service=self._source, reason=str(error))
            return None
        key = None if message.key is None else message.key.decode("utf-8", "replace")
        return Received(message.topic, message.partition, message.offset, key, record)

    async def _within(self, waiting: Awaitable[T], doing: str) -> T:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await waiting
        except (KafkaError, OSError) as error:
            raise named(error, self._bootstrap, f"{self._source}: {doing} {', '.join(self._topics)}") from error

    def _client(self) -> AIOKafkaConsumer:
        if self._failed is not None:
            raise self._failed
        if self._kafka is None:
            raise RuntimeError("a reader is used inside `async with`")
        return self._kafka

    async def _stop(self) -> None:
        kafka, self._kafka = self._kafka, None
        if kafka is None:
            return
        stopping = asyncio.ensure_future(kafka.stop())
        await asyncio.wait([stopping], timeout=DEADLINE_S)
        if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
            return
        log.warning("Kafka at %s: %s did not close cleanly", self._bootstrap, self._source)
        stopping.cancel()
        # aiokafka's stop() raises CancelledError, and leaves its sockets, where a fetch waits to be tried again.
        await kafka._client.close()
