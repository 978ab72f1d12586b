"""One response, many clients: what is written apart arrives apart, also where it is told again."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway_app.call import Ending
from gateway_app.client import Client
from gateway_app.response import EVENTS, Response, Responses
from gateway_app.stopping import Stop, client_left

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


def kept() -> Ending:
    return Ending(None, "s", 1, "c")


async def test_a_repeat_never_joins_what_is_being_stopped_or_was_received() -> None:
    responses, stop, wire = Responses(), Stop(), Wire()
    response = Response(wire.client, stop, streamed=EVENTS)
    responses.add(b"k", response)
    assert responses.find(b"k") is response
    stop.set(client_left())
    assert responses.find(b"k") is None
    other = Response(Wire().client, Stop(), streamed=EVENTS)
    responses.add(b"k", other)
    responses.settle(b"k", response, keep=kept())
    assert responses.find(b"k") is other
    await other.write(EVENT)
    assert await other.finish() and responses.find(b"k") is None
    responses.settle(b"k", other, keep=kept())
    assert responses.find(b"k") is None


async def test_what_is_kept_is_dropped_with_its_attempt() -> None:
    responses = Responses()
    for key in (b"a", b"b"):
        client = Wire().client
        client.gone = True
        response = Response(client, Stop(), streamed=EVENTS)
        await response.write(EVENT)
        assert not await response.finish()
        responses.settle(key, response, keep=Ending(None, "s", 1 if key == b"a" else 2, "c"))
    responses.drop("s", 1)
    assert responses.find(b"a") is None and responses.find(b"b") is not None
