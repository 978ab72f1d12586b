"""Calls in the store: where the prompt comes from, deliveries told twice, and files of the schema before."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_stories import call, completed, delivery, failed, opened, started

from polar.store import Store, queries
from schemas.packed import pack_ids
from schemas.sessions import Sampling


@pytest.fixture
def store(tmp_path):
    opened_store = Store(tmp_path / "polar.duckdb")
    yield opened_store
    opened_store.close()


def put(store, *records, start=0):
    store.apply([("polar.sessions", 0, start + i, record) for i, record in enumerate(records)])


def untold(number, **more):
    """A start whose engine tells the prompt with the answer."""
    return msgspec.structs.replace(started(number, [], **more), prompt_ids=None)


def told(number, prompt, response, base=None, kept=0):
    fields = {"prompt_ids": pack_ids(prompt), "base_call_id": base, "kept_ids": kept}
    return msgspec.structs.replace(completed(number, response), **fields)


def prompt(row):
    return row.prompt_base_call_id, row.kept_ids, row.new_prompt_tokens


def ids(store):
    return dict(store.read("SELECT call_id, prompt_ids FROM calls"))


def test_the_prompt_is_that_of_the_event_that_told_it(store):
    put(store, opened(), *call(1, [1, 2, 3], [4]), started(2, [5], base=1, kept=4), completed(2, [6]))
    put(store, untold(3, base=1, kept_messages=2), told(3, [7, 8], [9], base="s-0-c2", kept=5), start=9)
    first, second, third = queries.calls(store, "s")
    assert (prompt(first), prompt(second)) == ((None, 0, 3), ("s-0-c1", 4, 1))
    assert prompt(third) == ("s-0-c2", 5, 2)
    assert (third.base_call_id, third.kept_messages) == ("s-0-c1", 2)
    assert ids(store) == {"s-0-c1": [1, 2, 3], "s-0-c2": [5], "s-0-c3": [7, 8]}
    texts = [event.text for event in queries.session(store, "s").events]
    assert "call 3 openai.chat" in texts and "call 3 5+2 prompt tokens, 1 tokens, stop , version 0" in texts


def test_a_prompt_that_nobody_told_is_not_known(store):
    put(store, opened(), untold(1), untold(2, base=1), failed(2), started(3, [], base=1, kept=2))
    unknown, lost, whole = queries.calls(store, "s")
    assert prompt(unknown) == prompt(lost) == (None, None, None) and lost.state == "failed"
    assert prompt(whole) == ("s-0-c1", 2, 0)
    assert ids(store) == {"s-0-c1": None, "s-0-c2": None, "s-0-c3": []}


def test_the_end_may_come_before_the_start(store):
    put(store, told(1, [1, 2], [3]))
    assert queries.calls(store, "s") == []
    put(store, untold(1), opened(), start=1)
    assert [prompt(row) for row in queries.calls(store, "s")] == [(None, 0, 2)]


def test_parent_thread_history_rule_and_sampling_are_shown(store):
    facts = {"parent_call_id": "s-0-c1", "thread_id": "explorer", "auxiliary": "claude_code.title"}
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=64, stop=["END"], altered=["logit_bias"])
    exact = started(2, [2], base=1, kept=2, history="exact", sampling=sampling, **facts)
    put(store, opened(), started(1, [1]), exact, started(3, [3], history_note="images"))
    first, second, third = queries.calls(store, "s")
    assert {name: getattr(second, name) for name in facts} == facts
    assert {getattr(first, name) for name in facts} == {None}
    assert [(row.history, row.history_note) for row in (first, second, third)] == [
        ("template", None),
        ("exact", None),
        ("template", "images"),
    ]
    assert msgspec.convert(second.sampling, Sampling) == sampling
    texts = [event.text for event in queries.session(store, "s").events]
    assert "call 2 openai.chat 2+1 prompt tokens claude_code.title exact history" in texts
    assert "call 3 openai.chat 0+1 prompt tokens template history: images" in texts


def test_splits_are_counted_by_reason(store):
    notes = ["images", None, "unknown_history", "images"]
    put(store, *[started(n, [1], history_note=note) for n, note in enumerate(notes)])
    assert queries.status(store).splits == {"images": 2, "unknown_history": 1}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_delivered_once_is_delivered(deliveries):
    """Each is told (or told again) as the first part says, and ends its batch if the second does."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "polar.duckdb")
        put(store, opened(), started(1, [1]), completed(1, [2]))
        batch, offset = [], 3
        for delivered, ends in [*deliveries, (deliveries[0][0], True)]:
            batch.append(delivery(1, delivered))
            if ends:
                put(store, *batch, start=offset)
                batch, offset = [], offset + len(batch)
        [row] = queries.calls(store, "s")
        told_as = {delivered for delivered, _ in deliveries}
        assert row.state == ("delivered" if True in told_as else "undelivered")
        events = [event.text for event in queries.session(store, "s").events if event.type == "call.delivery"]
        words = {True: "call 1 delivered", False: "call 1 not delivered"}
        assert sorted(events) == sorted(words[one] for one in told_as)
        store.close()


def first_schema(path: Path) -> None:
    """A file of schema 1 with two calls: one whose prompt was told with its answer, and one that keeps it all."""
    script = resources.files("polar.store").joinpath("schema_0001.sql").read_text(encoding="utf-8")
    with duckdb.connect(str(path)) as database:
        database.execute(script)
        database.execute("CREATE VIEW calls AS SELECT s.*, len(s.prompt_ids) AS new_prompt_tokens FROM call_starts s")
        database.execute("CREATE TABLE schema_version (version INTEGER); INSERT INTO schema_version VALUES (1)")
        database.execute("INSERT INTO offsets VALUES ('polar.sessions', 0, 5)")
        columns = (
            'call_id, session_id, attempt, "at", number, dialect, model, streamed, base_call_id, kept_ids, '
            "kept_messages, messages_json, prompt_ids, sampling_json"
        )
        for number, base, kept, ids in ((1, None, 0, [1, 2]), (2, None, 0, []), (3, "s-0-c1", 2, [])):
            values = [f"s-0-c{number}", "s", 0, number, "openai.chat", "policy", True, base, kept, 0, "[]", ids, "{}"]
            marks = ", ".join(["?"] * 3 + ["now()"] + ["?"] * 10)
            database.execute(f"INSERT INTO call_starts ({columns}) VALUES ({marks})", values)
        database.execute("INSERT INTO call_ends (call_id, session_id, attempt) VALUES ('s-0-c1', 's', 0)")
        database.execute("INSERT INTO call_deliveries VALUES ('s-0-c1', 's', 0, now(), false)")


def test_a_file_of_the_first_schema_is_brought_on_and_keeps_its_rows(tmp_path):
    path = tmp_path / "polar.duckdb"
    first_schema(path)
    store = Store(path)
    assert store.read("FROM schema_version ORDER BY version") == [(1,), (2,)]
    assert store.offsets() == {("polar.sessions", 0): 5}
    first, second, third = queries.calls(store, "s")
    assert [prompt(row) for row in (first, second, third)] == [(None, 0, 2), (None, None, None), ("s-0-c1", 2, 0)]
    assert {(row.history, row.history_note, row.parent_call_id, row.thread_id) for row in (first, second, third)} == {
        (None, None, None, None)
    }
    assert first.state == "undelivered"
    put(store, opened(), delivery(1, True), untold(4), told(4, [7], [8]), start=5)
    assert [row.state for row in queries.calls(store, "s")] == ["delivered", "started", "started", "completed"]
    assert prompt(queries.calls(store, "s")[3]) == (None, 0, 1)
    assert queries.session(store, "s").attempts[0].calls == 4
    store.close()
    Store(path).close()


def test_a_file_brought_on_has_the_tables_of_a_new_one(tmp_path):
    first_schema(tmp_path / "old.duckdb")
    columns = "SELECT table_name, column_name, data_type FROM information_schema.columns ORDER BY ALL"
    stores = [Store(tmp_path / name) for name in ("old.duckdb", "new.duckdb")]
    old, new = (store.read(columns) for store in stores)
    assert old == new and ("call_starts", "thread_id", "VARCHAR") in new
    for store in stores:
        store.close()
