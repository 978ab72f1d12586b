"""The recorder on a real broker: stopped, killed and delivered again, each record is in the store once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from session_stories import session
from store_records import whole_run

from consumers.recorder import record
from polar.store import Store, queries
from schemas.ids import new_id
from streams.errors import KafkaUnavailable
from streams.producer import Producer
from streams.topics import SESSIONS

pytestmark = pytest.mark.kafka
DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys
from consumers.recorder import record
from polar.store import Store

class Telling(Store):
    def apply(self, received, positions=None):
        super().apply(received, positions)
        print(len(received), flush=True)

asyncio.run(record(Telling(sys.argv[1]), sys.argv[2], asyncio.Event()))
"""


@asynccontextmanager
async def recording(store, kafka):
    stop = asyncio.Event()
    task = asyncio.create_task(record(store, kafka, stop))
    yield task
    stop.set()
    await asyncio.wait_for(task, DEADLINE_S)


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def publish(kafka, records):
    async with Producer(kafka, source="test") as producer:
        for topic, record_ in records:
            await (await producer.post(topic, record_))


def calls(store, names):
    return sum(len(queries.calls(store, name)) for name in names)


async def test_a_whole_run_is_recorded_and_read_again_adds_nothing(kafka, tmp_path):
    run = whole_run()
    store = Store(tmp_path / "polar.duckdb")
    async with recording(store, kafka):
        await publish(kafka, [(topic, one) for topic, records in run.items() for one in records])
        await until(lambda: queries.status(store).versions_loaded == {"engine-1": 1})
        await until(lambda: queries.status(store).sessions == {"usable": 2} and len(queries.batches(store)) == 1)
    counts = {
        t: store.read(f"SELECT count(*) FROM {t}") for t in ("call_starts", "traces", "session_stages", "weights")
    }
    # As after a crash between the store and anything else: all is delivered once more.
    store.apply([(topic, 9, i, one) for topic, records in run.items() for i, one in enumerate(records)])
    assert counts == {t: store.read(f"SELECT count(*) FROM {t}") for t in counts}
    store.close()


async def test_killed_in_the_middle_it_goes_on_where_its_file_says(kafka, tmp_path):
    prefix = new_id()
    names = [f"{prefix}-{n}" for n in range(40)]
    path = tmp_path / "polar.duckdb"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(path), kafka]
    child = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    await publish(kafka, [(SESSIONS, one) for name in names[:20] for one in session(name, calls=3)])
    assert child.stdout is not None
    assert int(await asyncio.wait_for(child.stdout.readline(), DEADLINE_S)) > 0
    await publish(kafka, [(SESSIONS, one) for name in names[20:30] for one in session(name, calls=3)])
    child.send_signal(signal.SIGKILL)
    await child.wait()
    await publish(kafka, [(SESSIONS, one) for name in names[30:] for one in session(name, calls=3)])
    store = Store(path)
    async with recording(store, kafka):
        await until(lambda: calls(store, names) >= 120)
    assert calls(store, names) == 120
    duplicates = "SELECT call_id FROM call_ends GROUP BY call_id HAVING count(*) > 1"
    assert store.read(duplicates) == []
    assert store.read("SELECT count(*) FROM session_closings WHERE session_id LIKE ?", [f"{prefix}%"]) == [(40,)]
    store.close()


async def test_a_broker_that_is_away_is_named(tmp_path):
    store = Store(tmp_path / "polar.duckdb")
    with pytest.raises(KafkaUnavailable, match=r"127\.0\.0\.1:1"):
        await record(store, "127.0.0.1:1", asyncio.Event())
    store.close()
