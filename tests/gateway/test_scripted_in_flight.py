"""Calls in flight, in the scripted engine as in real vLLM: aborted, frozen, given new weights, left by their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from both_engines import ASKED, CHAT, GENERATE, Asking, Both, side_by_side
from engine_fixture import RunningEngine
from scripted_engine import Plan, always

pytestmark = pytest.mark.engine


@pytest.fixture
async def both(engine: RunningEngine) -> AsyncIterator[Both]:
    async with side_by_side(engine.url) as together:
        yield together


LONG = Plan(content="abc" * 2000, between_s=0.001)
ENDLESS = {"temperature": 1.0, "max_tokens": 2000, "ignore_eos": True, "logprobs": 0}


class Stream:
    """A generate call that is read event by event."""

    def __init__(self, asking: Asking, response: aiohttp.ClientResponse) -> None:
        self._asking, self._response = asking, response
        self.choices: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None

    async def read(self, count: int | None = None) -> None:
        """``count`` more choices, or all."""
        wanted = None if count is None else len(self.choices) + count
        while wanted is None or len(self.choices) < wanted:
            line = await self._response.content.readline()
            if line in (b"", b"data: [DONE]\n"):
                return
            if line.startswith(b"data: "):
                event = msgspec.json.decode(line[6:])
                self.choices += event["choices"]
                self.usage = event["usage"]

    @property
    def count(self) -> int:
        return sum(len(choice["token_ids"]) for choice in self.choices)


def streaming(asking: Asking, request_id: str, **changes: Any) -> Any:
    body = {
        "request_id": request_id,
        "token_ids": [5, 6, 7],
        "sampling_params": ENDLESS | changes,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return asking.http.post(asking.url + GENERATE, json=body)


async def test_aborted(both: Both) -> None:
    both.script.script = always(LONG)
    found = []
    for asking in (both.real, both.fake):
        async with streaming(asking, "gone") as response:
            stream = Stream(asking, response)
            await stream.read(3)
            await asking.ask("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-gone"]})
            await stream.read()
        last = stream.choices[-1]
        assert stream.usage["completion_tokens"] == stream.count < 2000
        assert last["weight_versions"] == [{"version": "0", "start": 0, "end": stream.count}]
        found.append((last["finish_reason"], list(last)))
    assert found[1] == found[0]
    assert both.script.aborted == ["generate-tokens-gone"]


async def test_new_version_in_flight(both: Both) -> None:
    """What is frozen by a pause goes on afterwards; each token has the version by which it was sampled."""
    both.script.script = always(LONG)
    for asking in (both.real, both.fake):
        async with streaming(asking, "through", max_tokens=600) as response:
            stream = Stream(asking, response)
            await stream.read(3)
            assert (await asking.ask("/pause?mode=keep")).body == {"status": "paused"}
            assert (await asking.ask("/is_paused", method="GET")).body == {"is_paused": True}
            await asking.ask("/update_weight_version", {"new_version": "1"})
            await asking.ask("/resume")
            await stream.read()
        await asking.ask("/update_weight_version", {"new_version": "0"})
        spans = stream.choices[-1]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert spans[0]["start"] == 0 < spans[0]["end"] == spans[1]["start"] < spans[1]["end"] == stream.count == 600


async def test_paused_engine_keeps_who_comes_waiting(both: Both) -> None:
    both.script.script = always(Plan(content="abc"))
    for asking in (both.real, both.fake):
        await asking.ask("/pause?mode=keep")
        call = asyncio.create_task(asking.ask(CHAT, ASKED | {"max_tokens": 1}))
        _, waiting = await asyncio.wait({call}, timeout=0.3)
        assert waiting
        await asking.ask("/resume")
        assert (await call).body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_pause_that_ends_what_runs(both: Both, mode: str) -> None:
    both.script.script = always(LONG)
    found = []
    for asking in (both.real, both.fake):
        async with streaming(asking, mode, max_tokens=100) as response:
            stream = Stream(asking, response)
            await stream.read(3)
            paused = await asking.ask(f"/pause?mode={mode}")
            await stream.read()
        await asking.ask("/resume")
        found.append((paused.body, stream.choices[-1]["finish_reason"]))
    assert found[1] == found[0]


async def test_client_that_leaves(both: Both) -> None:
    both.script.script = always(LONG)
    async with streaming(both.fake, "left") as response:
        await Stream(both.fake, response).read(3)
        response.close()
    async with asyncio.timeout(10):
        while not both.script.left:
            await asyncio.sleep(0.01)
    assert both.script.left == ["generate-tokens-left"]
    assert not both.script.running
