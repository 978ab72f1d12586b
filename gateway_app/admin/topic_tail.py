"""The last records of a topic, and those that follow, one JSON object a line."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from datetime import datetime

import msgspec

from streams.consumer import Reader, Received, read_last

POLL_S = 1.0
SOURCE = "polar-admin/tail"


async def tail(bootstrap: str, topic: str, *, session: str | None, limit: int, follow: bool) -> AsyncIterator[bytes]:
    """The last ``limit`` records (of one session, if given) by time, then new ones for as long as the client stays.

    A line is ``{"topic", "partition", "offset", "key", "record"}``, the record as it stands on the topic.
    """
    async with Reader(bootstrap, [topic], source=SOURCE, start="beginning" if session else "end") as reader:
        earlier = await _of_session(reader, session, limit) if session else await _last(reader, bootstrap, topic, limit)
        for received in sorted(earlier, key=_time)[-limit:]:
            yield line(received)
        while follow:
            for received in await reader.poll(POLL_S):
                if session is None or concerns(received, session):
                    yield line(received)


def line(received: Received) -> bytes:
    return msgspec.json.encode(msgspec.structs.asdict(received)) + b"\n"


def concerns(received: Received, session: str) -> bool:
    """Whether the record is about the session whose id is, starts or ends with ``session``."""
    identity = str(getattr(received.record, "session_id", ""))
    return identity.startswith(session) or identity.endswith(session)


async def _of_session(reader: Reader, session: str, limit: int) -> list[Received]:
    last: deque[Received] = deque(maxlen=limit)
    async for chunk in reader.chunks_to_end():
        last.extend(received for received in chunk if concerns(received, session))
    return list(last)


async def _last(reader: Reader, bootstrap: str, topic: str, limit: int) -> list[Received]:
    """What stands before the reader's positions, so that following it repeats nothing and leaves nothing out."""
    ends = reader.positions()
    last = await read_last(bootstrap, topic, limit, source=SOURCE)
    return [received for received in last if received.offset < ends[received.topic, received.partition]]


def _time(received: Received) -> datetime:
    at: datetime = received.record.at
    return at
