"""The file: every record once, rows and offsets together, and named errors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_stories import session
from store_records import positioned, published, registered, whole_run

from polar.store import Store, StoreError, queries
from polar.store.tables import KEYS
from schemas.scheduling import NodeHeartbeat

ROOT = Path(__file__).parents[2]
RUN = positioned(whole_run())


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "polar.duckdb")
    yield opened
    opened.close()


def content(store: Store) -> dict[str, list]:
    """Every row of every table, in an order of its own."""
    return {table: sorted(map(repr, store.read(f'FROM "{table}"'))) for table in [*KEYS, "offsets"]}


def test_each_record_of_a_run_is_kept(store):
    store.apply(RUN)
    assert store.offsets() == {(topic, 0): len(records) for topic, records in whole_run().items()}
    rows = content(store)
    empty = {"task_cancellations", "node_losses", "call_failures"}
    assert {table for table, found in rows.items() if not found} == empty
    assert len(rows["call_ends"]) == 6 and len(rows["session_stages"]) == 10


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4))
def test_redelivery_in_any_portions_adds_nothing(portions):
    """Each portion is delivered from some records back, as after a crash, and holds three of its records twice."""
    with tempfile.TemporaryDirectory() as folder:
        calm, other = Store(Path(folder) / "calm.duckdb"), Store(Path(folder) / "other.duckdb")
        calm.apply(RUN)
        position = 0
        for back, forward in [*portions, (5, len(RUN))]:
            portion = RUN[max(0, position - back) : position + forward]
            other.apply(portion + portion[:3])
            position = min(len(RUN), position + forward)
        assert content(other) == content(calm)
        calm.close()
        other.close()


def test_offsets_go_forward_only_and_pass_over_what_was_not_returned(store):
    store.apply(RUN[:1], {("polar.tasks", 0): 9, ("polar.weights", 0): 3})
    store.apply([], {("polar.tasks", 0): 4})
    store.apply([])
    assert store.offsets() == {("polar.tasks", 0): 9, ("polar.weights", 0): 3}


def test_what_fails_in_the_middle_leaves_neither_rows_nor_offsets(store):
    broken = msgspec.structs.replace(registered(), init_slots=2**40)
    with pytest.raises(Exception, match=r"(?i)int|value"):
        store.apply([*RUN, ("polar.scheduler", 0, 99, broken)])
    assert store.offsets() == {} and store.read("SELECT count(*) FROM traces") == [(0,)]
    store.apply(RUN)
    assert store.read("SELECT count(*) FROM traces") == [(2,)]


def test_it_opens_again_with_all_that_was_written(tmp_path):
    path = tmp_path / "below" / "polar.duckdb"
    first = Store(path)
    first.apply(RUN)
    expected = content(first)
    first.close()
    again = Store(path)
    assert content(again) == expected and again.read("FROM schema_version ORDER BY ALL") == [(1,), (2,)]
    again.close()


def test_only_the_newest_heartbeat_is_kept(store):
    beats = [NodeHeartbeat(node_id="node-1", incarnation="i1") for _ in range(5)]
    for offset, beat in enumerate(beats):
        store.apply([("polar.scheduler", 0, offset, beat)])
    store.apply([("polar.scheduler", 0, 9, beats[0]), ("polar.scheduler", 0, 10, beats[4])])
    [row] = store.records("FROM node_heartbeats")
    assert row["at"] == beats[4].at


def test_readers_in_other_threads_see_whole_batches_only(store):
    sizes, failures = set(), []
    stop = threading.Event()

    def look():
        while not stop.is_set():
            try:
                sizes.add(len(queries.calls(store, "s")))
            except StoreError as error:
                failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(10):
        records = session("s", calls=3, attempt=n)
        store.apply([("polar.sessions", 0, n * 100 + i, record) for i, record in enumerate(records)])
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == [] and {size % 3 for size in sizes} <= {0} and len(queries.calls(store, "s")) == 30


def test_values_are_parameters(store):
    nasty = "x'; DROP TABLE traces; --"
    store.apply(RUN)
    assert queries.session(store, nasty) is None
    assert queries.sessions(store, task_id=nasty, state=nasty) == []
    assert queries.trace(store, nasty) is None
    assert queries.pass_at_1(store, "train", task_ids=[nasty]).sessions == 0
    assert store.read("SELECT count(*) FROM traces") == [(2,)]


def child(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


OPEN = """
import sys
from polar.store import Store, StoreError
try:
    Store(sys.argv[1])
except StoreError as error:
    print(error)
"""

FILL = """
import resource, signal, sys
from polar.store import Store, StoreError
from store_records import positioned, whole_run
store = Store(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
try:
    store.apply(positioned(whole_run()))
except StoreError as error:
    print(error)
"""


def test_a_file_that_another_process_has_open_is_one_line(store):
    [line] = child(OPEN, store.path).stdout.splitlines()
    assert f"another process has the store open (process {os.getpid()})" in line and str(store.path) in line


def test_a_full_disk_is_one_line_and_what_was_written_stays(tmp_path):
    path = tmp_path / "polar.duckdb"
    [line] = child(FILL, path).stdout.splitlines()
    assert line == f"{path}: writing the store: the disk is full; free some space, then start again"
    store = Store(path)
    assert store.offsets() == {} and store.read("SELECT count(*) FROM traces") == [(0,)]
    store.apply(RUN)
    store.close()


def test_a_file_that_is_no_store_is_named(tmp_path):
    path = tmp_path / "polar.duckdb"
    path.write_text("something else " * 1000)
    with pytest.raises(StoreError, match="no DuckDB file; move it away"):
        Store(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another run folder"):
        Store(tmp_path / "file" / "polar.duckdb")


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "polar.duckdb"
    Store(path).close()
    with duckdb.connect(str(path)) as database:
        database.execute("INSERT INTO schema_version VALUES (7)")
    with pytest.raises(StoreError, match="schema 7, this one knows 2"):
        Store(path)


def test_the_first_row_of_a_key_stays(store):
    first, second = published(1), msgspec.structs.replace(published(1), sha256="other")
    store.apply([("polar.weights", 0, 0, first), ("polar.weights", 0, 1, second)])
    store.apply([("polar.weights", 0, 2, second)])
    assert [row.sha256 for row in queries.weights(store)] == ["ab"]
