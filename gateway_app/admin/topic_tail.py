"""The last records of a topic, and those that follow, one JSON object a line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from streams.consumer import Reader, Received

POLL_S = 1.0
_SOURCE = "polar-admin/tail"


def line(received: Received) -> bytes:
    """``{"topic", "partition", "offset", "key", "record"}``; the record as it stands on the topic."""
    return msgspec.json.encode(msgspec.structs.asdict(received)) + b"\n"


async def tail(bootstrap: str, topic: str, *, session: str | None, limit: int, follow: bool) -> AsyncIterator[bytes]:
    """The last ``limit`` records (of one session, if given) by time, then new ones for as long as the client stays."""
    start: Literal["beginning", "end"] = "beginning" if session else "end"
    async with Reader(bootstrap, [topic], source=_SOURCE, start=start) as reader:
        earlier = await reader.read_to_end() if session else await reader.last(limit)
        for received in sorted((one for one in earlier if concerns(one, session)), key=_time)[-limit:]:
            yield line(received)
        while follow:
            for received in await reader.poll(POLL_S):
                if concerns(received, session):
                    yield line(received)


def concerns(received: Received, session: str | None) -> bool:
    """Whether the record is about the session whose id is, starts or ends with ``session``."""
    if session is None:
        return True
    identity = str(getattr(received.record, "session_id", ""))
    return identity.startswith(session) or identity.endswith(session)


def _time(received: Received) -> Any:
    return received.record.at
