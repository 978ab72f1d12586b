"""The batcher: traces and closed groups in, numbered batches out (``polar/batching``), exactly once.

- Each batch (its traces, then its seal) and each exclusion is one transaction, together with the offsets of group
  ``polar-batcher`` on ``polar.traces``. These are safe offsets: a start begins at the oldest record of a group that is
  neither sealed nor excluded, so that nothing in memory is needed.
- What was sealed and excluded is read from ``polar.batches`` itself, whose traces are skipped.
- One at a time: the transactional id fences an older process, which then cannot commit; it ends with exit code 1.
- After a failed write the process ends, and starts again from the log.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from consumers.process import run_process, say_ready
from polar.batching.former import Action, Batch, State, evolve, resume, safe_offsets
from polar.settings import Settings
from streams.admin import topic_lag
from streams.consumer import Reader, Received
from streams.producer import Producer
from streams.topics import BATCHES, TRACES

SOURCE = "batcher"
TRANSACTIONAL_ID = "polar-batcher"
GROUP_ID = "polar-batcher"
POLL_S = 0.5
POLL_RECORDS = 100
"""Traces may be long: fewer at a time."""
OFFSETS_EVERY = 1000
"""Records without an action after which the offsets are committed by themselves, to bound what a start reads again."""

log = logging.getLogger(__name__)


class Batcher:
    """Evolves the state record by record, and writes what comes of it."""

    def __init__(self, state: State, producer: Producer) -> None:
        self._state = state
        self._producer = producer
        self._uncommitted = 0

    async def take(self, received: list[Received]) -> None:
        """Raises Fenced or KafkaUnavailable, after which this object is of no more use."""
        for one in received:
            action = evolve(self._state, one.partition, one.offset, one.record)
            self._uncommitted += 1
            if action is not None or self._uncommitted >= OFFSETS_EVERY:
                await self._write(action)

    async def _write(self, action: Action | None) -> None:
        offsets = {(TRACES, partition): offset for partition, offset in safe_offsets(self._state).items()}
        async with self._producer.transaction():
            if isinstance(action, Batch):
                for trace in action.traces:
                    await self._producer.post(BATCHES, trace)
                await self._producer.post(BATCHES, action.seal)
            elif action is not None:
                await self._producer.post(BATCHES, action)
            await self._producer.send_offsets(offsets, GROUP_ID)
        self._uncommitted = 0
        if action is not None:
            log.info("%s", _line(action))


def _line(action: Action) -> str:
    if isinstance(action, Batch):
        seal = action.seal
        return (
            f"batch {seal.batch} of {seal.policy}: {len(seal.groups)} groups, {seal.traces} traces, "
            f"{seal.trained_tokens} tokens of versions {seal.oldest_version} to {seal.newest_version}"
        )
    return f"group {action.group_id} excluded: {action.reason} ({action.detail})"


async def _resumed(settings: Settings) -> State:
    """What the batches topic tells. This process must have fenced the former one already."""
    state = State(batch_groups=settings.batch_groups, staleness_limit=settings.staleness_limit)
    async with Reader(
        settings.kafka_bootstrap,
        [BATCHES],
        source=SOURCE,
        start="beginning",
        skip_types=frozenset({"batch.trace"}),
    ) as reader:
        for one in await reader.read_to_end():
            resume(state, one.record)
    return state


async def _committed(bootstrap: str) -> dict[tuple[str, int], int]:
    """The next offset of each partition of the traces topic, as the last transaction left it."""
    return {
        (topic.topic, partition.partition): partition.committed[GROUP_ID]
        for topic in await topic_lag(bootstrap)
        for partition in topic.partitions
        if topic.topic == TRACES and GROUP_ID in partition.committed
    }


async def form_batches(settings: Settings, stop: asyncio.Event) -> None:
    """Runs until ``stop``. Raises Fenced when a newer batcher has started, KafkaUnavailable, OffsetLost."""
    bootstrap = settings.kafka_bootstrap
    # First of all: from here on no former batcher can commit.
    async with Producer(bootstrap, source=SOURCE, transactional_id=TRANSACTIONAL_ID) as producer:
        state = await _resumed(settings)
        start = await _committed(bootstrap)
        log.info("goes on after %s, from %s", state.sealed or "nothing", start or "the beginning")
        async with Reader(bootstrap, [TRACES], source=SOURCE, start=start, dead_letters=True) as reader:
            batcher = Batcher(state, producer)
            say_ready()
            while not stop.is_set():
                await batcher.take(await reader.poll(timeout_s=POLL_S, max_records=POLL_RECORDS))


if __name__ == "__main__":
    sys.exit(run_process(SOURCE, form_batches))
