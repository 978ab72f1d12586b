"""Whatever fails behind the gateway is told in the dialect's shape, is on the log, and is never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dialect_calls import Got, ask, root
from engine_fixture import free_port
from gateway_stand import Stand, stand, story, story_until
from provider_clients import CLIENTS
from scripted_engine import Fault, Plan, ScriptedEngine
from session_stories import ending, fold, opened

from polar.trajectories import assemble, whole_calls
from schemas.ids import new_id
from schemas.packed import unpack_ids
from schemas.sessions import CallCompleted, CallFailed, CallStarted, SessionRecord
from streams.broker import LocalBroker

pytestmark = pytest.mark.kafka

APIS = ["tokens", "chat"]
SAMPLES = {"tokens": "generate", "chat": "chat"}
TEXT = "a reply of a few words"

each_api = pytest.mark.parametrize("api", APIS)
each_way = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
each_dialect = pytest.mark.parametrize("dialect", CLIENTS)

FAULTS = {
    "status": (Fault("status"), "engine_fault"),
    "cut": (Fault("cut", after=3), "engine_unavailable"),
    "error": (Fault("error", after=3), "engine_fault"),
    "garbage": (Fault("garbage", after=3), "engine_fault"),
    "no_finish": (Fault("no_finish"), "inexact_sample"),
    "no_ids": (Fault("no_ids", after=2), "inexact_sample"),
    "no_logprobs": (Fault("no_logprobs", after=2), "inexact_sample"),
    "short_logprobs": (Fault("short_logprobs", after=2), "inexact_sample"),
    "missing_logprob": (Fault("missing_logprob", after=2), "inexact_sample"),
    "wrong_usage": (Fault("wrong_usage"), "inexact_sample"),
    "no_versions": (Fault("no_versions"), "inexact_sample"),
}
ONLY_TOKENS = {"no_versions"}
"""An engine that tells the prompt itself can tell no wrong one; its versions are asked for."""


def none_trained(events: list[SessionRecord], session: str) -> bool:
    view = fold([opened(session), *events, *ending(session)], session)
    return not assemble(view).traces and not any(call.trained for call in whole_calls(view))


async def check_failed(kafka: str, session: str, reason: str, *, infrastructure: bool = True) -> None:
    events = await story(kafka, session)
    (failed,) = [event for event in events if isinstance(event, CallFailed)]
    assert (failed.reason, failed.infrastructure) == (reason, infrastructure)
    assert isinstance(events[0], CallStarted) and not any(isinstance(event, CallCompleted) for event in events)
    assert none_trained(events, session)


def check_told(got: Got) -> None:
    """Before the headers a status with Retry-After, after them an error in place of the end."""
    if got.streamed:
        assert got.status == 200 and got.turn is None
    else:
        assert got.status == 503 and got.headers["Retry-After"] == "2"
    assert got.error()["message"]


@each_api
@each_way
@pytest.mark.parametrize("kind", FAULTS)
async def test_a_fault_of_the_engine_is_told_and_not_trained(
    tmp_path: Path, kafka: str, api: Any, streamed: bool, kind: str
) -> None:
    if api == "chat" and kind in ONLY_TOKENS:
        return
    fault, reason = FAULTS[kind]
    if api == "chat" and not streamed and kind == "cut":
        reason = "engine_unavailable"
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    engine.fail_next(SAMPLES[api], *[fault] * 2)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session), "openai.chat", streamed=streamed)
    check_told(got)
    if not got.streamed:
        assert got.error()["code"] == reason
    await check_failed(kafka, session, reason)


@each_dialect
@each_way
async def test_each_dialect_tells_a_fault_in_its_own_shape(
    tmp_path: Path, kafka: str, dialect: str, streamed: bool
) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("cut", after=4)))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        got = await ask(gateway, root(gateway, session), dialect, streamed=streamed)
    assert got.streamed is streamed
    check_told(got)
    if dialect == "google.generate" and streamed:
        assert got.blocks[-1].startswith(b'{"error"'), "an error is read only where it comes by itself"
    await check_failed(kafka, session, "engine_unavailable")


@each_dialect
@each_way
async def test_an_engine_that_is_away_is_waited_for_and_then_refused(
    tmp_path: Path, kafka: str, dialect: str, streamed: bool
) -> None:
    session, url = new_id(), f"http://127.0.0.1:{free_port()}"
    async with stand(tmp_path, kafka, url, engine_hold_s=0.2) as gateway:
        got = await ask(gateway, root(gateway, session), dialect, streamed=streamed)
    assert not got.streamed and got.status == 503 and got.headers["Retry-After"] == "2"
    assert got.error()["message"]
    await check_failed(kafka, session, "engine_unavailable")


@each_api
@each_way
async def test_an_engine_that_comes_back_answers_late(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch, api: Any, streamed: bool
) -> None:
    for name in ("KEEP_ALIVE_S", "HEADERS_S", "TICK_S"):
        monkeypatch.setattr(f"gateway_app.answers.{name}", 0.05)
    port, session, engine = free_port(), new_id(), ScriptedEngine(Plan(content=TEXT))
    async with stand(tmp_path, kafka, f"http://127.0.0.1:{port}", engine_api=api) as gateway:
        asking = asyncio.create_task(ask(gateway, root(gateway, session), "anthropic.messages", streamed=streamed))
        await story_until(kafka, session, CallFailed)
        async with engine.serving(port=port):
            got = await asking
    assert got.text() == TEXT
    if streamed:
        assert got.content.index(b"event: ping") < got.content.index(b"event: message_start")
    events = await story(kafka, session)
    assert [type(event) for event in events[:3]] == [CallStarted, CallFailed, CallStarted]
    assert isinstance(events[3], CallCompleted) and events[3].call_id == events[2].call_id != events[0].call_id
    (trace,) = assemble(fold([opened(session), *events, *ending(session)], session)).traces
    assert unpack_ids(trace.prompt_ids).tolist() == engine.sampled[0].prompt_ids


@each_api
@each_way
async def test_an_engine_that_was_there_and_restarts_is_waited_for(
    tmp_path: Path, kafka: str, api: Any, streamed: bool
) -> None:
    port, session, engine = free_port(), new_id(), ScriptedEngine(Plan(content=TEXT))
    async with stand(tmp_path, kafka, f"http://127.0.0.1:{port}", engine_api=api) as gateway:
        base = root(gateway, session)
        async with engine.serving(port=port):
            assert (await ask(gateway, base, "openai.chat", streamed=streamed)).text() == TEXT
        asking = asyncio.create_task(ask(gateway, base, "openai.chat", streamed=streamed))
        await story_until(kafka, session, CallFailed)
        async with engine.serving(port=port):
            assert (await asking).text() == TEXT


@each_api
@each_way
async def test_a_paused_engine_goes_on_where_it_was(tmp_path: Path, kafka: str, api: Any, streamed: bool) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("pause", after=3)))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        asking = asyncio.create_task(ask(gateway, root(gateway, session), "openai.chat", streamed=streamed))
        async with asyncio.timeout(20):
            while not engine.paused:
                await asyncio.sleep(0.01)
        assert not asking.done()
        engine.resume()
        got = await asking
    assert got.text() == TEXT
    assert len(engine.sampled) == 1 and not none_trained(await story(kafka, session), session)


@each_api
@each_way
@pytest.mark.parametrize("after", [0, 3])
async def test_an_engine_that_stalls_is_given_up(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch, api: Any, streamed: bool, after: int
) -> None:
    monkeypatch.setattr("gateway_app.answers.TICK_S", 0.05)
    monkeypatch.setattr("gateway_app.sampling.exact.ABORT_S", 0.3)
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("stall", after=after)))
    async with (
        engine.serving(),
        stand(tmp_path, kafka, engine.url, engine_api=api, engine_stall_s=0.5) as gateway,
    ):
        got = await ask(gateway, root(gateway, session), "anthropic.messages", streamed=streamed)
        async with asyncio.timeout(20):
            while engine.running:
                await asyncio.sleep(0.01)
    check_told(got)
    await check_failed(kafka, session, "engine_unavailable")


@each_api
@each_dialect
@each_way
async def test_a_prompt_that_is_too_long_is_the_dialects_own_error(
    tmp_path: Path, kafka: str, api: Any, dialect: str, streamed: bool
) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT), max_model_len=20)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session), dialect, streamed=streamed)
    error = got.error()
    assert got.status == 400 and not got.streamed and "Retry-After" not in got.headers
    expected = {
        "openai.chat": error.get("code") == "context_length_exceeded",
        "openai.responses": error.get("code") == "context_length_exceeded",
        "anthropic.messages": error["message"].startswith("prompt is too long"),
        "google.generate": error.get("status") == "INVALID_ARGUMENT",
    }
    assert expected[dialect], error
    await check_failed(kafka, session, "context_overflow", infrastructure=False)


@each_api
@each_way
@pytest.mark.parametrize("asked", [200, 100_000])
async def test_more_tokens_than_there_is_room_for_are_the_room(
    tmp_path: Path, kafka: str, api: Any, streamed: bool, asked: int
) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="word " * 2000), max_model_len=300)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session), "openai.chat", streamed=streamed, tools=[], max_tokens=asked)
    room = 300 - len(engine.sampled[0].prompt_ids)
    assert got.turn is not None and len(engine.sampled[0].ids) == min(asked, room)
    (completed,) = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    assert completed.finish_reason == "length"


PICTURE = "iVBORw0KGgo="
SHOWN: dict[str, Any] = {
    "openai.chat": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}],
            }
        ]
    },
    "anthropic.messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
                ],
            }
        ]
    },
    "openai.responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}]}
        ]
    },
    "google.generate": {
        "contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PICTURE}}]}]
    },
}


@each_api
@each_dialect
@each_way
async def test_a_picture_for_a_model_that_reads_is_refused_with_the_reason(
    tmp_path: Path, kafka: str, api: Any, dialect: str, streamed: bool
) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session), dialect, streamed=streamed, **SHOWN[dialect])
    assert got.status == 400 and "multimodal" in got.error()["message"]
    await check_failed(kafka, session, "request_refused", infrastructure=False)


@each_dialect
async def test_a_picture_for_a_model_that_sees_reaches_it(tmp_path: Path, kafka: str, dialect: str) -> None:
    engine = ScriptedEngine(Plan(content=TEXT), images=True)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        got = await ask(gateway, root(gateway, new_id()), dialect, **SHOWN[dialect])
    assert got.text() == TEXT
    parts = engine.bodies("render")[0]["messages"][-1]["content"]
    assert parts == [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}]


async def test_weights_that_change_during_a_chat_call_spoil_it(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("pause", after=3)))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api="chat") as gateway:
        await changed_while_paused(gateway, engine, session, "openai.chat")
    await check_failed(kafka, session, "inexact_sample")


async def test_weights_that_change_between_chat_calls_spoil_none(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api="chat") as gateway:
        for version in ("1", "2"):
            engine.version = version
            await asyncio.sleep(0.6)
            assert (await ask(gateway, root(gateway, session), "openai.chat")).status == 200
    completed = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    assert [event.weight_versions[0].version for event in completed] == [1, 2]


async def test_weights_that_change_during_a_token_call_are_recorded_by_span(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("pause", after=3)))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        got = await changed_while_paused(gateway, engine, session, "openai.chat")
    assert got.text() == TEXT
    (completed,) = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    whole = len(engine.sampled[0].ids)
    assert [(span.version, span.start, span.end) for span in completed.weight_versions] == [(0, 0, 3), (7, 3, whole)]


async def changed_while_paused(gateway: Stand, engine: ScriptedEngine, session: str, dialect: str) -> Got:
    asking = asyncio.create_task(ask(gateway, root(gateway, session), dialect, streamed=True))
    async with asyncio.timeout(20):
        while not engine.paused:
            await asyncio.sleep(0.01)
    engine.version = "7"
    engine.resume()
    return await asking


async def test_without_kafka_a_call_is_refused_after_a_bounded_wait_and_works_when_it_is_back(tmp_path: Path) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    with LocalBroker(tmp_path / "broker") as broker:
        async with engine.serving(), stand(tmp_path, broker.bootstrap, engine.url, publish_s=1.5) as gateway:
            base = root(gateway, session)
            assert (await ask(gateway, base, "openai.chat")).status == 200
            broker.stop()
            asked = [(dialect, streamed) for dialect in CLIENTS for streamed in (False, True)]
            refused = await asyncio.gather(*(ask(gateway, base, one, streamed=way) for one, way in asked))
            told = [(got.status == 503 and got.headers["Retry-After"] == "2") or got.turn is None for got in refused]
            assert all(told)
            assert all("recorded" in got.error()["message"] for got in refused)


@each_api
@each_way
async def test_an_engine_that_accepts_and_never_answers_is_given_up(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch, api: Any, streamed: bool
) -> None:
    monkeypatch.setattr("gateway_app.answers.TICK_S", 0.05)
    monkeypatch.setattr("gateway_app.sampling.exact.ABORT_S", 0.3)
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api, engine_stall_s=0.5) as gateway:
        base = root(gateway, session)
        assert (await ask(gateway, base, "openai.chat", streamed=streamed)).text() == TEXT
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            gateway.gateway.engine.url = "http://{}:{}".format(*server.sockets[0].getsockname())
            refused = await ask(gateway, base, "openai.chat", streamed=streamed)
    check_told(refused)
    failed = [event for event in await story(kafka, session) if isinstance(event, CallFailed)]
    assert [(event.reason, event.infrastructure) for event in failed] == [("engine_unavailable", True)]
