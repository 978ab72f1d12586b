"""One response, many clients: what is written apart arrives apart, also where it is told again."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway_app.client import Client
from gateway_app.response import EVENTS, Response
from gateway_app.stopping import Stop

EVENT, ERROR = b'data: {"text":"a"}\n\n', b'{"error":{"code":503}}'


class Wire:
    """A client at the ASGI level: keeps each write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.client = Client(self._receive, self._send)

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            self.written.append(message["body"])


async def test_who_follows_a_response_that_breaks_off_does_not_wait_for_ever() -> None:
    first, other = Wire(), Wire()
    response = Response(first.client, Stop(), streamed=EVENTS)
    following = asyncio.create_task(response.follow(other.client))
    await response.write(EVENT)
    await asyncio.sleep(0)
    response.close()
    async with asyncio.timeout(10):
        await following
    assert other.written == [EVENT]


@given(
    parts=st.lists(st.sampled_from([EVENT, b"data: {}\n\n"]), max_size=6),
    late=st.integers(0, 6),
)
def test_an_error_is_a_write_of_its_own_for_each_client(parts: list[bytes], late: int) -> None:
    async def written() -> list[list[bytes]]:
        first, repeats = Wire(), [Wire(), Wire()]
        response = Response(first.client, Stop(), streamed=EVENTS)
        following = []
        for place, part in enumerate([*parts, ERROR]):
            if place == min(late, len(parts)):
                following = [asyncio.create_task(response.follow(one.client)) for one in repeats[:1]]
            await response.write(part)
        await response.finish()
        following.append(asyncio.create_task(response.follow(repeats[1].client)))
        await asyncio.gather(*following)
        return [one.written for one in (first, *repeats)]

    assert asyncio.run(written()) == [[*parts, ERROR]] * 3
