"""A connection to one broker that carries produce requests, one at a time, packed and parsed by hand.

The format is the Kafka protocol's: Produce version 7, which every broker since 2.1 takes. ``sender``
decides what is sent when; here are only bytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c as crc32c
from cramjam import zstd

PRODUCE = 0
VERSION = 7
ALL_REPLICAS = -1
COMPRESSED_FROM = 16 * 1024
"""Bytes. Smaller batches would cost more time than zstd saves in space."""
LEVEL = 1

_LENGTH = struct.Struct(">i")
_PARTITION = struct.Struct(">ii")
_ANSWERED = struct.Struct(">ihqqq")
_NO_STRING = -1

# A record batch of the message format 2: https://kafka.apache.org/documentation/#recordbatch
_BATCH_LENGTH, _CRC, _ATTRIBUTES, _RECORDS = 8, 17, 21, 61
_COUNTED_FROM = 12


class Sent(NamedTuple):
    """A batch of records for one partition."""

    topic: str
    partition: int
    batch: bytes | bytearray


class Written(NamedTuple):
    """What the broker says of one batch: an error code, 0 for none, and the offset of the first record."""

    topic: str
    partition: int
    code: int
    offset: int


class Link(asyncio.Protocol):
    """``on_answer`` gets what the broker says of a request; ``on_lost`` is called once, when the connection ends."""

    def __init__(
        self, client_id: str, on_answer: Callable[[Link, list[Written]], None], on_lost: Callable[[Link], None]
    ) -> None:
        self._client_id = client_id.encode()
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._transport: Any = None
        self._number = 0
        self._received = bytearray()
        self.lost = False

    def request(self, batches: Iterable[Sent], timeout_s: float) -> None:
        """Sends a request; its answer must have come before the next is sent."""
        self._number = (self._number + 1) % 2**31
        self._transport.writelines(_request(self._number, self._client_id, batches, timeout_s))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        received = self._received
        if len(received) < _LENGTH.size or len(received) < _LENGTH.size + _LENGTH.unpack_from(received)[0]:
            return
        frame, self._received = bytes(received), bytearray()
        number, written = _answer(frame)
        if number == self._number:
            self._on_answer(self, written)
        else:
            self.abort()


def compressed(batch: bytearray) -> bytes | bytearray:
    """``batch`` with its records compressed where that makes it smaller."""
    if len(batch) < COMPRESSED_FROM:
        return batch
    records = bytes(zstd.compress(memoryview(batch)[_RECORDS:], level=LEVEL))
    if len(records) >= len(batch) - _RECORDS:
        return batch
    head = batch[:_RECORDS]
    _LENGTH.pack_into(head, _BATCH_LENGTH, _RECORDS - _COUNTED_FROM + len(records))
    head[_ATTRIBUTES + 1] |= DefaultRecordBatch.CODEC_ZSTD
    whole = bytes(head) + records
    crc = crc32c(memoryview(whole)[_ATTRIBUTES:])
    return b"".join((whole[:_CRC], crc.to_bytes(4, "big"), whole[_ATTRIBUTES:]))


def _request(number: int, client_id: bytes, batches: Iterable[Sent], timeout_s: float) -> list[bytes | bytearray]:
    by_topic: dict[str, list[Sent]] = {}
    for sent in batches:
        by_topic.setdefault(sent.topic, []).append(sent)
    parts: list[bytes | bytearray] = [
        struct.pack(f">hhih{len(client_id)}s", PRODUCE, VERSION, number, len(client_id), client_id),
        struct.pack(">hhii", _NO_STRING, ALL_REPLICAS, int(timeout_s * 1000), len(by_topic)),
    ]
    for topic, several in by_topic.items():
        name = topic.encode()
        parts.append(struct.pack(f">h{len(name)}si", len(name), name, len(several)))
        for sent in several:
            parts += (_PARTITION.pack(sent.partition, len(sent.batch)), sent.batch)
    return [_LENGTH.pack(sum(map(len, parts))), *parts]


def _answer(frame: bytes) -> tuple[int, list[Written]]:
    """The number of the request, and what it says of each batch. ``frame`` begins with its length."""
    number, topics = struct.unpack_from(">ii", frame, 4)
    at, written = 12, []
    for _ in range(topics):
        (length,) = struct.unpack_from(">h", frame, at)
        topic = frame[at + 2 : at + 2 + length].decode()
        at += 2 + length
        (partitions,) = _LENGTH.unpack_from(frame, at)
        at += _LENGTH.size
        for _ in range(partitions):
            partition, code, offset, _, _ = _ANSWERED.unpack_from(frame, at)
            at += _ANSWERED.size
            written.append(Written(topic, partition, code, offset))
    return number, written
