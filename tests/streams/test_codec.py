from __future__ import annotations

import json
import math
import uuid

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_strategies import any_record

from schemas.record import SCHEMA_VERSION
from schemas.tasks import TaskCancelled
from schemas.weights import Probe, WeightsLoaded, WeightsPublished
from streams.codec import belongs, decode, encode, record_type, types_of
from streams.errors import DecodeError, NewerSchemaError, RecordRefused
from streams.topics import SCHEDULER, TABLE, TASKS, WEIGHTS


@given(any_record())
def test_every_record_comes_back_as_it_was(pair):
    topic, record = pair
    value, headers = encode(record, source="test")
    assert decode(topic, value, headers) == record
    assert belongs(topic, record)
    assert record_type(headers) in types_of(topic)


@given(any_record())
def test_values_are_json_that_anyone_can_read(pair):
    topic, record = pair
    value, headers = encode(record, source="test")
    assert json.loads(value)["type"] == record_type(headers)
    assert TABLE[topic].key(record) == TABLE[topic].key(decode(topic, value, headers))


def test_headers_follow_the_cloudevents_binding():
    record = TaskCancelled(task_id="t")
    headers = dict(encode(record, source="polar-admin")[1])
    assert headers["ce_specversion"] == b"1.0"
    assert headers["ce_type"] == b"task.cancelled"
    assert headers["ce_source"] == b"polar-admin"
    assert headers["content-type"] == b"application/json"
    assert headers["schema_version"] == SCHEMA_VERSION.encode()
    assert msgspec.convert(headers["ce_time"].decode(), type(record.at)) == record.at
    uuid.UUID(headers["ce_id"].decode())


def test_two_encodings_have_different_event_ids():
    record = TaskCancelled(task_id="t")
    first, second = (dict(encode(record, source="test")[1])["ce_id"] for _ in range(2))
    assert first != second


def _with_version(version: str):
    value, headers = encode(TaskCancelled(task_id="t"), source="test")
    return value, [(name, version.encode() if name == "schema_version" else text) for name, text in headers]


def test_a_newer_minor_version_is_read_and_its_unknown_fields_are_ignored():
    value, headers = _with_version("1.99")
    value = json.dumps(json.loads(value) | {"added_later": 1}).encode()
    assert decode(TASKS, value, headers).task_id == "t"


@pytest.mark.parametrize("version", ["2.0", "10.1", "3"])
def test_a_newer_major_version_is_refused(version):
    with pytest.raises(NewerSchemaError, match=rf"{TASKS}.*{version}.*update"):
        decode(TASKS, *_with_version(version))


@pytest.mark.parametrize("version", ["", "x.1", "-1.0", "²"])
def test_a_version_that_is_no_version_is_a_decode_error(version):
    with pytest.raises(DecodeError, match="schema_version"):
        decode(TASKS, *_with_version(version))


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_record_are_a_decode_error(value):
    _, headers = encode(TaskCancelled(task_id="t"), source="test")
    with pytest.raises(DecodeError, match=TASKS):
        decode(TASKS, value, headers)


def test_a_record_of_another_topic_is_a_decode_error():
    with pytest.raises(DecodeError, match=SCHEDULER):
        decode(SCHEDULER, *encode(TaskCancelled(task_id="t"), source="test"))


def test_a_header_that_contradicts_the_value_is_a_decode_error():
    value, headers = encode(TaskCancelled(task_id="t"), source="test")
    with pytest.raises(DecodeError, match="ce_type"):
        decode(TASKS, value, [(n, b"task.submitted" if n == "ce_type" else v) for n, v in headers])


def test_a_message_without_a_value_is_a_decode_error():
    with pytest.raises(DecodeError, match="without a value"):
        decode(TASKS, None, encode(TaskCancelled(task_id="t"), source="test")[1])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_float_that_json_cannot_carry_is_refused_by_name(number):
    record = WeightsPublished(
        policy="p", version=1, path="/w", sha256="0", probe=Probe(prompt_ids=b"", logprobs=b""), metrics={"kl": number}
    )
    with pytest.raises(RecordRefused, match=r"WeightsPublished\.metrics\['kl'\]"):
        encode(record, source="test")


def test_weights_are_keyed_so_that_compaction_keeps_the_last_of_each_engine():
    published = WeightsPublished(
        policy="p", version=1, path="/w", sha256="0", probe=Probe(prompt_ids=b"", logprobs=b"")
    )
    loaded = WeightsLoaded(
        policy="p", version=1, engine_id="e", probe_mean_difference=0.0, probe_max_difference=0.0, seconds=1.0
    )
    assert [TABLE[WEIGHTS].key(record) for record in (published, loaded)] == ["p", "p/e"]
