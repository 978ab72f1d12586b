"""A program that asks again is given the first sample, once; one that has its answer is given a new one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_stand import Stand, stand, story, story_until
from scripted_engine import Fault, Plan, ScriptedEngine, in_order
from session_stories import ending, fold, opened

from polar.trajectories import assemble, whole_calls
from schemas.ids import new_id
from schemas.sessions import CallCompleted, CallDelivery, CallStarted

pytestmark = pytest.mark.kafka

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
SLOW = Plan(content="a slow answer of some words", between_s=0.05)


async def leave(gateway: Stand, base: str, *, streamed: bool) -> None:
    """Asks, and closes the connection while the answer is under way."""
    url = f"{base}/chat/completions"
    asking = asyncio.create_task(gateway.http.post(url, json=BODY | {"stream": streamed}))
    if streamed:
        response = await asking
        await response.content.readuntil(b'"content":"a')
        response.close()
        return
    async with asyncio.timeout(10):
        while not gateway.gateway.serving._responses._under_way:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def trained(events: list[Any], session: str) -> int:
    whole = [opened(session), *events, *ending(session)]
    assert assemble(fold(whole, session)).verdict.usable
    return sum(call.trained for call in whole_calls(fold(whole, session)))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_repeat_joins_the_call_that_is_under_way(tmp_path: Path, kafka: str, streamed: bool) -> None:
    session, engine = new_id(), ScriptedEngine(SLOW)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        await leave(gateway, base, streamed=streamed)
        answer = await gateway.chat(base, messages=BODY["messages"], model="policy", stream=streamed)
    events = await story(kafka, session)
    assert answer.message()["content"] == SLOW.content
    assert [type(event) for event in events] == [CallStarted, CallCompleted, CallDelivery]
    assert events[2].delivered and len(engine.sampled) == 1 and not engine.aborted
    assert trained(events, session) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_repeat_replays_the_answer_that_nobody_received(tmp_path: Path, kafka: str, streamed: bool) -> None:
    session, engine = new_id(), ScriptedEngine(SLOW)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        await leave(gateway, base, streamed=streamed)
        events = await story_until(kafka, session, CallDelivery)
        assert not events[-1].delivered
        answer = await gateway.chat(base, messages=BODY["messages"], model="policy", stream=streamed)
        events = await story_until(kafka, session, CallDelivery, 2)
    assert answer.message()["content"] == SLOW.content and len(engine.sampled) == 1
    assert [event.delivered for event in events if isinstance(event, CallDelivery)] == [False, True]
    assert trained(events, session) == 1


async def test_an_identical_request_after_delivery_is_a_new_sample(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(in_order(Plan(content="one"), Plan(content="two")))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        answers = [await gateway.chat(gateway.base(session)) for _ in range(2)]
    assert [answer.message()["content"] for answer in answers] == ["one", "two"]
    assert trained(await story(kafka, session), session) == 2


async def test_two_that_ask_the_same_at_once_share_one_sample(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(SLOW)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        answers = await asyncio.gather(*(gateway.chat(base, stream=True) for _ in range(3)))
    assert [answer.text() for answer in answers] == [SLOW.content] * 3 and all(answer.done for answer in answers)
    assert len(engine.sampled) == 1 and trained(await story(kafka, session), session) == 1


async def test_other_sessions_streams_and_dialects_are_other_requests(tmp_path: Path, kafka: str) -> None:
    sessions, engine = [new_id(), new_id()], ScriptedEngine(SLOW)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        bases = [gateway.base(session) for session in sessions]
        asked = [gateway.chat(base, stream=streamed) for base in bases for streamed in (False, True)]
        await asyncio.gather(*asked)
    assert len(engine.sampled) == 4


@pytest.mark.parametrize("api", ["tokens", "chat"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_for_good_ends_the_generation(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch, api: Any, streamed: bool
) -> None:
    monkeypatch.setattr("gateway_app.response.REJOIN_S", 0.1)
    endless = Plan(content="a slow answer " * 500, between_s=0.02)
    session, engine = new_id(), ScriptedEngine(endless)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        await leave(gateway, gateway.base(session), streamed=streamed)
        async with asyncio.timeout(10):
            while engine.running or not engine.sampled:
                await asyncio.sleep(0.02)
        while gateway.gateway.serving._responses._under_way:
            await asyncio.sleep(0.02)
    events = await story(kafka, session)
    assert engine.aborted if api == "tokens" else engine.left
    assert not any(isinstance(event, CallDelivery) and event.delivered for event in events)
    assert len(engine.sampled[0].ids) < 500 and trained_none(events, session)


def trained_none(events: list[Any], session: str) -> bool:
    whole = fold([opened(session), *events, *ending(session)], session)
    return not any(call.trained for call in whole_calls(whole))


async def test_what_is_kept_for_repeats_has_a_limit(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_app.response.REPLAYS", 1)
    engine = ScriptedEngine(SLOW)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        for session in (new_id(), new_id()):
            await leave(gateway, gateway.base(session), streamed=True)
            await story_until(kafka, session, CallDelivery)
        kept = gateway.gateway.serving._responses._undelivered
        assert len(kept) == 1


async def test_a_failed_call_is_sampled_anew(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    engine.fail_next("generate", Fault("status"))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        statuses = [(await gateway.chat(gateway.base(session))).status for _ in range(2)]
    assert statuses == [503, 200]


async def test_a_client_that_reads_nothing_is_still_a_client(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="words " * 20))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        url = f"{gateway.base(session)}/chat/completions"
        async with (
            aiohttp.ClientSession(read_bufsize=1) as http,
            http.post(url, json=BODY | {"stream": True}) as answer,
        ):
            await story_until(kafka, session, CallCompleted)
            assert b"[DONE]" in await answer.read()
        assert (await story_until(kafka, session, CallDelivery))[-1].delivered
