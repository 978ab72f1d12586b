"""From the harness's request to the trainer's sequence: real vLLM, the gateway, Kafka, the story and the builders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_fixture import RunningEngine
from engine_proxy import EngineProxy
from gateway_stand import stand, story_until
from session_stories import ending, fold, opened

from polar.engine.client import EngineClient
from polar.trajectories import assemble
from schemas.ids import new_id
from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask
from schemas.sessions import CallDelivery, CallStarted, SessionRecord
from schemas.traces import Trace

pytestmark = [pytest.mark.kafka, pytest.mark.engine]

BODY: dict[str, Any] = {"max_tokens": 40, "seed": 3, "temperature": 0.8}
TURN = [5, 9, 5]
"""Ids of a next turn: no template makes them, so the prompt is the first call's to the id."""
VERSIONS = [3, 4]


class Sampled(msgspec.Struct):
    """One call as vLLM reported it: spans are (start, end, version)."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]


def sampled(proxy: EngineProxy, index: int) -> Sampled:
    ids, logprobs, versions = proxy.sampled(index)
    return Sampled(
        proxy.prompt(index), ids, logprobs, [(span["start"], span["end"], int(span["version"])) for span in versions]
    )


@asynccontextmanager
async def versions(url: str) -> AsyncIterator[EngineClient]:
    """A client that may change the engine's weight version, which is set back."""
    async with EngineClient(url) as client:
        before = int(await client.weight_version())
        try:
            yield client
        finally:
            await client.set_weight_version(before)


async def two_calls(proxy: EngineProxy, engine: EngineClient, tmp_path: Path, kafka: str, body: dict) -> list[Any]:
    """The captured story of a session whose second prompt is the first one's ids, then TURN."""
    session, messages = new_id(), [{"role": "user", "content": "hello world"}]
    async with proxy.running(), stand(tmp_path, kafka, proxy.url, history="template") as gateway:
        for version in VERSIONS:
            await engine.set_weight_version(version)
            await gateway.chat(gateway.base(session), messages=messages, **BODY, **body)
            messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]
            going_on = [*proxy.prompt(0), *proxy.sampled(0)[0], *TURN]
            proxy.rerender = lambda rendered, ids=going_on: rendered | {"token_ids": ids}
        return await story_until(kafka, session, CallDelivery, 2)


def traces(events: list[SessionRecord], builder: str) -> list[Trace]:
    session = events[0].session_id
    story = fold([opened(session, builder=builder), *events, *ending(session)], session)
    assembly = assemble(story)
    assert assembly.verdict.usable, assembly.verdict.reason
    return assembly.traces


def check(trace: Trace, prompt: list[int], parts: list[Sampled | list[int]], calls: list[str]) -> None:
    """``parts`` of the response, in order: what was sampled, and ids between that only the engine saw."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    for part in parts:
        if isinstance(part, Sampled):
            spans += [(len(ids) + start, len(ids) + end, version) for start, end, version in part.spans]
        new = part.ids if isinstance(part, Sampled) else part
        ids += new
        mask += [int(isinstance(part, Sampled))] * len(new)
        logprobs += part.logprobs if isinstance(part, Sampled) else [0.0] * len(new)
    assert unpack_ids(trace.prompt_ids).tolist() == prompt
    assert unpack_ids(trace.response_ids).tolist() == ids
    assert unpack_mask(trace.loss_mask).tolist() == mask
    assert np.array_equal(unpack_logprobs(trace.logprobs), np.array(logprobs, np.float32))
    assert [(span.start, span.end, span.version) for span in trace.spans] == spans
    assert [span.call_id for span in trace.spans] == calls
    assert {span.temperature for span in trace.spans} == {0.8}


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["whole", "streamed"])
async def test_the_traces_of_a_session_hold_what_vllm_sampled_id_for_id(
    tmp_path: Path, kafka: str, engine: RunningEngine, body: dict[str, Any]
) -> None:
    proxy = EngineProxy(engine.url)
    async with versions(engine.url) as client:
        events = await two_calls(proxy, client, tmp_path, kafka, body)
    one, two = sampled(proxy, 0), sampled(proxy, 1)
    calls = [event.call_id for event in events if isinstance(event, CallStarted)]
    assert one.ids and two.ids and two.prompt == [*one.prompt, *one.ids, *TURN]
    assert [span[2] for span in one.spans + two.spans] == VERSIONS

    first, second = traces(events, "per_request")
    check(first, one.prompt, [one], calls[:1])
    check(second, two.prompt, [two], calls[1:])
    (merged,) = traces(events, "prefix_merging")
    check(merged, one.prompt, [one, TURN, two], calls)
