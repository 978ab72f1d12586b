"""Reading records: ``Reader`` for followers that keep their own positions, ``GroupReader`` for members of a group.

Both read committed records by default, never commit on their own, and reset no position silently. A message that
cannot be decoded is put aside, loudly; a newer schema version stops the reader.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from streams.codec import decode, record_type
from streams.dead_letters import put_aside, shout
from streams.errors import DecodeError, KafkaUnavailable, OffsetLost, StreamError, named
from streams.topics import DEAD_LETTERS, MIB, TABLE

T = TypeVar("T")
Partition = tuple[str, int]
Rebalance = Callable[[set[Partition]], Awaitable[None] | None]

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


class _Consumer:
    """What both readers share: connecting, polling within deadlines, decoding, putting aside."""

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
            fetch_max_wait_ms=250,
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
        fetching = client.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        try:
            batches = await self._within(fetching, "reading", DEADLINE_S + timeout_s)
            self._listen_for_silence(client, time.monotonic() - started, bool(batches))
            decoded = [await self._decoded(message) for messages in batches.values() for message in messages]
        except StreamError as error:
            self._failed = error
            raise
        return [one for one in decoded if one is not None]

    def _listen_for_silence(self, client: AIOKafkaConsumer, waited_s: float, heard: bool) -> None:
        answered = max((client.last_poll_timestamp(tp) or 0 for tp in client.assignment()), default=0)
        if heard or answered != self._answered or not client.assignment():
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

    async def _within(self, waiting: Awaitable[T], doing: str, deadline_s: float = DEADLINE_S) -> T:
        try:
            async with asyncio.timeout(deadline_s):
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
        try:
            async with asyncio.timeout(DEADLINE_S):
                await kafka.stop()
        except (KafkaError, OSError) as error:
            log.warning("Kafka at %s: %s did not close cleanly: %r", self._bootstrap, self._source, error)


class Reader(_Consumer):
    """Reads all partitions of ``topics``, from ``start``, without a group: whoever reads keeps the positions.

    ``start`` names the next offset of each partition; one that it does not name is read from its beginning.
    ``skip_types``: records with these ``ce_type`` are neither decoded nor returned. With ``dead_letters``, messages
    that cannot be decoded are also written to ``polar.dead-letters``: for a reader whose positions survive a restart,
    since one that reads from the beginning would write them each time.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Collection[str],
        *,
        source: str,
        start: Literal["beginning", "end"] | Mapping[Partition, int] = "beginning",
        read_committed: bool = True,
        skip_types: frozenset[str] = frozenset(),
        dead_letters: bool = False,
    ) -> None:
        super().__init__(
            bootstrap,
            topics,
            source=source,
            skip_types=skip_types,
            dead_letters=dead_letters,
            isolation_level="read_committed" if read_committed else "read_uncommitted",
            auto_offset_reset="none",
        )
        self._start = start
        self._positions: dict[Partition, int] = {}

    def positions(self) -> dict[Partition, int]:
        """The next offset of each partition, after what was last returned."""
        return {(tp[0], tp[1]): offset for tp, offset in self._positions.items()}

    async def read_to_end(self) -> list[Received]:
        """Everything up to the ends of the log as of this call, in one list: see ``chunks_to_end``."""
        return [one async for chunk in self.chunks_to_end() for one in chunk]

    async def chunks_to_end(self, max_records: int = 500) -> AsyncIterator[list[Received]]:
        """All records up to the ends of the log as of this call, some at a time: memory stays bounded.

        A reader of committed records goes up to the last stable offset. The offsets of transaction markers and of
        aborted records are passed over, so it ends where these come last.
        """
        client = self._client()
        ends = await self._within(client.end_offsets(list(client.assignment())), "asking for the end of")
        while any(self._positions[tp] < end for tp, end in ends.items()):
            if received := await self._received(SLICE_S, max_records):
                yield received

    async def step_back(self, offsets: int) -> set[int]:
        """Moves each partition ``offsets`` back; returns those that are not at their beginning now.

        Offsets are not records: transaction markers, and records that were aborted or compacted away, have theirs.
        """
        client = self._client()
        partitions = list(client.assignment())
        first = await self._within(client.beginning_offsets(partitions), "asking for the beginning of")
        for tp in partitions:
            self._positions[tp] = max(first[tp], self._positions[tp] - offsets)
            client.seek(tp, self._positions[tp])
        return {tp.partition for tp in partitions if self._positions[tp] > first[tp]}

    async def _received(self, timeout_s: float, max_records: int) -> list[Received]:
        received = await super()._received(timeout_s, max_records)
        client = self._client()
        for tp in client.assignment():
            self._positions[tp] = await self._within(client.position(tp), "asking for the position in")
        return received

    async def _begin(self) -> None:
        client = self._client()
        partitions = await self._within(self._partitions(client), "looking for the partitions of")
        client.assign(partitions)
        first = await self._within(client.beginning_offsets(partitions), "asking for the beginning of")
        end = await self._within(client.end_offsets(partitions), "asking for the end of")
        for tp in partitions:
            position = self._first_position(tp, first[tp], end[tp])
            client.seek(tp, position)
            self._positions[tp] = position

    def _first_position(self, tp: TopicPartition, first: int, end: int) -> int:
        if self._start == "beginning":
            return first
        if self._start == "end":
            return end
        assert not isinstance(self._start, str)
        position = self._start.get((tp.topic, tp.partition), first)
        if position < first:
            raise OffsetLost(
                f"{self._source}: {tp.topic}[{tp.partition}] begins at offset {first}, but {position} is still needed"
            )
        return position

    async def _partitions(self, client: AIOKafkaConsumer) -> list[TopicPartition]:
        """Waits until each topic exists."""
        while True:
            if (await client.topics()).issuperset(self._topics):
                return [TopicPartition(name, n) for name in self._topics for n in range(TABLE[name].partitions)]
            await asyncio.sleep(0.2)


class GroupReader(_Consumer):
    """A member of a consumer group: reads committed records of its share of the partitions, from what was committed.

    ``on_revoked`` and ``on_assigned`` get the partitions that go and come, and may be async; what is committed in
    ``on_revoked`` is still this member's. Messages that cannot be decoded go to ``polar.dead-letters``.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Collection[str],
        *,
        group_id: str,
        source: str,
        on_revoked: Rebalance | None = None,
        on_assigned: Rebalance | None = None,
        skip_types: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(
            bootstrap,
            topics,
            source=source,
            skip_types=skip_types,
            dead_letters=True,
            group_id=group_id,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            session_timeout_ms=10_000,
            heartbeat_interval_ms=2_000,
        )
        self._listener = _Listener(on_revoked, on_assigned)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commits the next offset to read of each partition. Raises Rebalanced when one is no longer ours."""
        if offsets:
            wanted = {TopicPartition(*partition): offset for partition, offset in offsets.items()}
            await self._within(self._client().commit(wanted), "committing offsets of")

    async def committed(self, partitions: Collection[Partition] | None = None) -> dict[Partition, int | None]:
        """What the group has committed, of ``partitions`` or of this member's own; None where nothing was."""
        client = self._client()
        wanted = client.assignment() if partitions is None else [TopicPartition(*one) for one in partitions]
        return {
            (tp.topic, tp.partition): await self._within(client.committed(tp), "asking for commits of") for tp in wanted
        }

    def assignment(self) -> set[Partition]:
        """The partitions that this member has now."""
        return {(tp.topic, tp.partition) for tp in self._client().assignment()}

    async def _begin(self) -> None:
        self._client().subscribe(self._topics, listener=self._listener)


class _Listener(ConsumerRebalanceListener):
    def __init__(self, on_revoked: Rebalance | None, on_assigned: Rebalance | None) -> None:
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        await _call(self._on_revoked, revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        await _call(self._on_assigned, assigned)


async def _call(callback: Rebalance | None, partitions: Collection[TopicPartition]) -> None:
    if callback is not None:
        result = callback({(tp.topic, tp.partition) for tp in partitions})
        if inspect.isawaitable(result):
            await result


async def read_last(bootstrap: str, topic: str, n: int, *, source: str = "tail") -> list[Received]:
    """The last ``n`` records of each partition of ``topic`` (at most), each partition in order."""
    span = n
    while True:
        async with Reader(bootstrap, [topic], source=source, start="end") as reader:
            cut = await reader.step_back(span)
            last = _last_of_each(await reader.read_to_end(), n)
        if all(len(last.get(partition, ())) >= n for partition in cut):
            return [one for partition in sorted(last) for one in last[partition]]
        span *= 4


def _last_of_each(received: list[Received], n: int) -> dict[int, list[Received]]:
    by_partition: dict[int, list[Received]] = {}
    for one in received:
        by_partition.setdefault(one.partition, []).append(one)
    return {partition: records[-n:] for partition, records in by_partition.items()}
