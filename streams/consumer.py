"""Reading records: ``Reader`` for followers that keep their own positions, ``GroupReader`` for members of a group.

Both read committed records by default, never commit on their own, and reset no position silently. A message that
cannot be decoded is put aside, loudly; a newer schema version stops the reader.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Literal

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.structs import ConsumerRecord

from streams.errors import OffsetLost, StreamError
from streams.polling import SLICE_S, Polling, Received
from streams.topics import TABLE

__all__ = ["GroupReader", "Reader", "Received", "read_last"]

Partition = tuple[str, int]
Rebalance = Callable[[set[Partition]], Awaitable[None] | None]


class Reader(Polling):
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


class GroupReader(Polling):
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

    def still_ours(self, received: Collection[Received]) -> list[Received]:
        """Those of the last poll's records whose partitions have not been revoked since.

        A partition that went and came back is read again from what is committed, so its records are left out too.
        """
        return [one for one in received if (one.topic, one.partition) not in self._listener.revoked]

    async def _begin(self) -> None:
        self._client().subscribe(self._topics, listener=self._listener)

    async def _fetched(
        self, client: AIOKafkaConsumer, timeout_s: float, max_records: int
    ) -> dict[TopicPartition, list[ConsumerRecord]] | None:
        batches = await super()._fetched(client, timeout_s, max_records)
        # During a rebalance aiokafka returns nothing, so these are of the partitions that are ours at this moment.
        self._listener.revoked.clear()
        return batches

    async def _received(self, timeout_s: float, max_records: int) -> list[Received]:
        received = await super()._received(timeout_s, max_records)
        if received and self._listener.calling is not None:
            self._failed = StreamError(f"{self._source}: {self._listener.calling} has failed; the log says how")
            raise self._failed
        return received


class _Listener(ConsumerRebalanceListener):
    """``calling`` names the callback that is running, or that has raised, which aiokafka only logs.

    ``revoked`` collects the partitions that went, until its reader clears it.
    """

    def __init__(self, on_revoked: Rebalance | None, on_assigned: Rebalance | None) -> None:
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self.calling: str | None = None
        self.revoked: set[Partition] = set()

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.revoked |= {(tp.topic, tp.partition) for tp in revoked}
        await self._call("on_revoked", self._on_revoked, revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        await self._call("on_assigned", self._on_assigned, assigned)

    async def _call(self, name: str, callback: Rebalance | None, partitions: Collection[TopicPartition]) -> None:
        if callback is not None:
            self.calling = name
            result = callback({(tp.topic, tp.partition) for tp in partitions})
            if inspect.isawaitable(result):
                await result
            self.calling = None


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
