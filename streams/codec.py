"""Records to Kafka values and back: JSON by msgspec, CloudEvents headers, and the schema version.

Headers (CloudEvents Kafka binding, binary mode): ``ce_specversion``, ``ce_type`` (the record's tag), ``ce_id``,
``ce_source``, ``ce_time``, ``content-type``, and our ``schema_version`` (``major.minor``). A newer minor version is
read, its unknown fields ignored; a newer major version is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec.structs import astuple

from schemas.ids import new_id
from schemas.record import SCHEMA_VERSION, Record
from streams.errors import DecodeError, NewerSchemaError, RecordRefused
from streams.topics import TABLE

Headers = Iterable[tuple[str, bytes]]

_encoder = msgspec.json.Encoder()
_decoders = {name: msgspec.json.Decoder(spec.record) for name, spec in TABLE.items()}
_types = {name: get_args(spec.record) or (spec.record,) for name, spec in TABLE.items()}
_tags = {name: {kind.__struct_config__.tag for kind in kinds} for name, kinds in _types.items()}
_MAJOR = int(SCHEMA_VERSION.split(".")[0])
_SPECVERSION = ("ce_specversion", b"1.0")
_CONTENT_TYPE = ("content-type", b"application/json")
_VERSION = ("schema_version", SCHEMA_VERSION.encode())
_PLAIN = frozenset({str, int, bool, bytes, type(None), datetime})
"""What cannot hold a float: most of a record."""


def encode(record: Record, *, source: str) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The value and headers of ``record``; ``source`` names the service that writes it.

    Raises RecordRefused for a float that JSON cannot carry (NaN, infinity), naming the field.
    """
    if not _finite(record):
        path = _not_finite(record, type(record).__name__)
        raise RecordRefused(f"{path} is not a finite number, which JSON cannot carry")
    headers = [
        _SPECVERSION,
        _type_header(type(record)),
        ("ce_id", new_id().encode()),
        _source_header(source),
        ("ce_time", record.at.isoformat().encode()),
        _CONTENT_TYPE,
        _VERSION,
    ]
    return _encoder.encode(record), headers


def decode(topic: str, value: bytes | None, headers: Headers) -> Any:
    """The record in ``value``.

    Raises DecodeError for bytes that are no record of ``topic``, NewerSchemaError for a newer major version.
    """
    known = dict(headers)
    _check_version(topic, known)
    if value is None:
        raise DecodeError(f"{topic}: a message without a value")
    try:
        record = _decoders[topic].decode(value)
    except (msgspec.DecodeError, ValueError) as error:
        raise DecodeError(f"{topic}: {error}") from error
    if (announced := known.get("ce_type")) is not None and announced != _tag(record).encode():
        raise DecodeError(f"{topic}: header ce_type says {announced!r}, the value is a {_tag(record)}")
    return record


def record_type(headers: Headers) -> str:
    """``ce_type``, without touching the value; empty where the header is missing."""
    for name, value in headers:
        if name == "ce_type":
            return value.decode("utf-8", "replace")
    return ""


def belongs(topic: str, record: Record) -> bool:
    """Whether ``topic`` carries records of this type."""
    return isinstance(record, _types[topic])


def record_types(topic: str) -> tuple[type[Record], ...]:
    """The classes of the records that ``topic`` carries."""
    return _types[topic]


def types_of(topic: str) -> frozenset[str]:
    """The ``ce_type`` of every record that ``topic`` carries."""
    return frozenset(_tags[topic])


def _check_version(topic: str, headers: Mapping[str, bytes]) -> None:
    text = headers.get("schema_version", b"").decode("utf-8", "replace")
    major = text.partition(".")[0]
    if not (major.isascii() and major.isdigit()):
        raise DecodeError(f"{topic}: header schema_version is {text!r}, not major.minor")
    if int(major) > _MAJOR:
        raise NewerSchemaError(
            f"{topic}: a record has schema version {text}, this program reads up to {SCHEMA_VERSION}; update it"
        )


def _tag(record: Record) -> str:
    return str(record.__struct_config__.tag)


@cache
def _type_header(kind: type[Record]) -> tuple[str, bytes]:
    return ("ce_type", str(kind.__struct_config__.tag).encode())


@cache
def _source_header(source: str) -> tuple[str, bytes]:
    return ("ce_source", source.encode())


def _finite(record: Record) -> bool:
    """Whether ``_not_finite`` finds nothing. It looks at every value of every record, so it keeps no path."""
    left: list[Any] = [record]
    while left:
        value = left.pop()
        kind = type(value)
        if kind is dict:
            children = value.values()
        elif kind is list or kind is tuple:
            children = value
        elif kind is float or not isinstance(value, msgspec.Struct):
            if _not_finite(value, "") is not None:
                return False
            continue
        else:
            children = astuple(value)
        for child in children:
            if type(child) not in _PLAIN:
                left.append(child)
    return True


def _not_finite(value: Any, path: str) -> str | None:
    """The path of the first float below ``value`` that is NaN or infinite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, msgspec.Struct):
        children: Iterable[tuple[Any, Any]] = ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        children = ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        children = ((f"[{index}]", child) for index, child in enumerate(value))
    else:
        return None
    for name, child in children:
        if (found := _not_finite(child, path + name)) is not None:
            return found
    return None
