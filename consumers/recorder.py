"""The recorder: every topic but the dead letters goes into the store, each record once.

Positions are kept in the store, in the transaction of the rows. It runs in the admin app, whose process has the file.
"""

from __future__ import annotations

import asyncio
import logging

from polar.store import Store
from streams.consumer import Reader
from streams.topics import BATCHES, SCHEDULER, SESSIONS, TASKS, TRACES, WEIGHTS

TOPICS = (TASKS, SCHEDULER, SESSIONS, TRACES, BATCHES, WEIGHTS)
SOURCE = "polar-recorder"
POLL_S = 0.25

log = logging.getLogger(SOURCE)


async def record(store: Store, bootstrap: str, stop: asyncio.Event) -> None:
    """Records until ``stop`` is set. Raises StoreError, or StreamError when Kafka is away: both end it."""
    async with Reader(bootstrap, TOPICS, source=SOURCE, start=store.offsets(), dead_letters=True) as reader:
        log.info("recording into %s", store.path)
        stored = store.offsets()
        while not stop.is_set():
            received = await reader.poll(POLL_S)
            positions = reader.positions()
            if received or any(stored.get(partition, 0) < end for partition, end in positions.items()):
                rows = [(one.topic, one.partition, one.offset, one.record) for one in received]
                await asyncio.to_thread(store.apply, rows, positions)
                stored = positions
