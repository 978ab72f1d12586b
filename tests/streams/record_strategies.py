"""Hypothesis strategies for every record type, made from the types themselves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import hypothesis
import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from schemas.batches import BatchTrace
from schemas.packed import pack_ids, pack_logprobs, pack_mask
from schemas.record import Record
from schemas.sessions import CallCompleted, VersionSpan
from schemas.traces import SampledSpan, Trace
from streams.codec import record_types
from streams.topics import TABLE

FIRST_FOUND = hypothesis.settings(phases=[hypothesis.Phase.generate], derandomize=True, database=None)

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
IDS = st.integers(0, 2**31 - 1)
TIMES = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))

BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    inspect.AnyType: JSON,
    inspect.NoneType: st.none(),
    inspect.BoolType: st.booleans(),
    inspect.BytesType: st.binary(max_size=40),
    inspect.DateTimeType: TIMES,
    inspect.StrType: TEXT,
}


def records(topic: str) -> st.SearchStrategy[Record]:
    """Any record of ``topic``."""
    return st.one_of([record(kind) for kind in record_types(topic)])


def any_record() -> st.SearchStrategy[tuple[str, Record]]:
    """A topic and a record that it carries."""
    return st.sampled_from(sorted(TABLE)).flatmap(lambda topic: st.tuples(st.just(topic), records(topic)))


def record(kind: type) -> st.SearchStrategy[Any]:
    """Any ``kind``; its token arrays have the lengths that it demands."""
    if kind is CallCompleted:
        return sampled().flatmap(_call_completed)
    if kind is Trace:
        return sampled().flatmap(_trace)
    if kind is BatchTrace:
        return _built(BatchTrace, trace=record(Trace))
    return _built(kind)


def sampled() -> st.SearchStrategy[list[tuple[int, float, int]]]:
    """Token ids with their log-prob and loss mask."""
    return st.lists(st.tuples(IDS, st.floats(-50, 0, width=32), st.integers(0, 1)), max_size=20)


def _call_completed(tokens: list[tuple[int, float, int]]) -> st.SearchStrategy[CallCompleted]:
    n = len(tokens)
    return _built(
        CallCompleted,
        response_ids=st.just(pack_ids(t[0] for t in tokens)),
        logprobs=st.just(pack_logprobs(t[1] for t in tokens)),
        weight_versions=st.just([VersionSpan(3, 0, n)] if n else []),
    )


def _trace(tokens: list[tuple[int, float, int]]) -> st.SearchStrategy[Trace]:
    return _built(
        Trace,
        response_ids=st.just(pack_ids(t[0] for t in tokens)),
        logprobs=st.just(pack_logprobs(t[1] for t in tokens)),
        loss_mask=st.just(pack_mask(t[2] for t in tokens)),
        spans=st.just([SampledSpan(start=0, end=len(tokens), version=1, call_id="c")]),
    )


def _built(kind: type, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = {field.name: _of(field.type) for field in inspect.type_info(kind).fields if field.name not in fixed}
    return st.builds(kind, **fields, **fixed)


def _of(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case inspect.Metadata():
            return _of(info.type)
        case inspect.IntType():
            low = info.ge if info.ge is not None else -(2**31)
            return st.integers(low, info.le if info.le is not None else 2**31)
        case inspect.FloatType():
            return _floats(info)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.UnionType():
            return st.one_of([_of(one) for one in info.types])
        case inspect.ListType():
            return st.lists(_of(info.item_type), max_size=3)
        case inspect.TupleType():
            return st.tuples(*[_of(one) for one in info.item_types])
        case inspect.DictType():
            return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
        case inspect.StructType():
            return record(info.cls)
    return BY_TYPE[type(info)]


def _floats(info: inspect.FloatType) -> st.SearchStrategy[float]:
    bounds = (info.gt, info.ge, info.lt, info.le)
    if bounds == (None, None, None, None):
        return FLOATS
    low = info.ge if info.ge is not None else info.gt if info.gt is not None else -1e6
    high = info.le if info.le is not None else info.lt if info.lt is not None else 1e6
    return st.floats(low, high, exclude_min=low == info.gt, exclude_max=high == info.lt, allow_subnormal=False)


def example_of(kind: type) -> Any:
    """A record of this type, always the same but for its time, which is the present."""
    found = hypothesis.find(record(kind), lambda one: True, settings=FIRST_FOUND)
    return msgspec.structs.replace(found, at=datetime.now(UTC))
