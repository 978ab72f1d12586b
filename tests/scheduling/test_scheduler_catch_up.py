"""The scheduler's start folds the log as it is read: it does not hold all of it."""

from __future__ import annotations

from types import SimpleNamespace

from world import registered

from consumers.scheduler import Scheduler
from polar.settings import Settings
from streams.consumer import Received
from streams.topics import SCHEDULER


async def test_each_chunk_of_the_log_is_folded_before_the_next_is_read():
    async def chunks():
        for n in range(3):
            assert len(scheduler._state.nodes) == n
            yield [Received(SCHEDULER, 0, n, None, registered(f"node-{n}", "i1"))]

    log = SimpleNamespace(positions=lambda: {(SCHEDULER, 0): 0}, chunks_to_end=chunks)
    scheduler = Scheduler(Settings(), None, log, log)
    await scheduler.catch_up()
    assert len(scheduler._state.nodes) == 3
