"""The gateway before real vLLM, with real Kafka: what is on the log is what the engine sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fixture import RunningEngine, free_port
from engine_proxy import EngineProxy
from gateway_stand import SECRET, stand, story, story_until

from polar.engine import token_api
from polar.engine.client import EngineClient
from polar.session_token import sign
from schemas.ids import new_id
from schemas.packed import unpack_ids, unpack_logprobs
from schemas.scheduling import Prewarm, SessionExited
from schemas.sessions import CallCompleted, CallDelivery, CallFailed, CallStarted
from schemas.tasks import EvaluatorSpec, TaskSpec
from streams.broker import LocalBroker
from streams.producer import Producer
from streams.topics import SCHEDULER

pytestmark = [pytest.mark.kafka, pytest.mark.engine]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_captured_is_what_the_engine_sent(
    tmp_path: Path, kafka: str, engine: RunningEngine, streamed: bool
) -> None:
    session = new_id()
    proxy = EngineProxy(engine.url)
    body: dict[str, Any] = {"max_tokens": 120, "seed": 3, "temperature": 0.8, "tools": TOOLS}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with proxy.running(), stand(tmp_path, kafka, proxy.url) as gateway:
        answer = await gateway.chat(gateway.base(session), **body)
    started, completed, delivery = await story(kafka, session)
    assert isinstance(started, CallStarted) and isinstance(completed, CallCompleted)
    ids, logprobs, versions = proxy.sampled()

    assert unpack_ids(completed.response_ids).tolist() == ids
    assert np.array_equal(unpack_logprobs(completed.logprobs), np.array(logprobs, dtype=np.float32))
    assert [(str(s.version), s.start, s.end) for s in completed.weight_versions] == [
        (s["version"], s["start"], s["end"]) for s in versions
    ]
    assert unpack_ids(started.prompt_ids).tolist() == proxy.prompt()
    assert started.sampling.temperature == 0.8 and started.sampling.seed == 3
    assert started.tools == TOOLS and started.streamed is streamed
    assert delivery == CallDelivery(
        session_id=session, attempt=0, call_id=started.call_id, delivered=True, at=delivery.at
    )
    if streamed:
        assert answer.done and answer.finish_reasons() == [completed.finish_reason]
        assert answer.text() == (completed.message["content"] or "")
        assert answer.events[-1]["usage"]["completion_tokens"] == len(ids)
    else:
        assert answer.body["choices"][0]["message"] == completed.message
        assert answer.body["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_same_seed_gives_what_vllm_itself_reports(
    tmp_path: Path, kafka: str, engine: RunningEngine, streamed: bool
) -> None:
    session, body = new_id(), {"max_tokens": 60, "seed": 11, "tools": TOOLS}
    async with stand(tmp_path, kafka, engine.url) as gateway:
        await gateway.chat(gateway.base(session), stream=streamed, **body)
        direct = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hello world"}],
            "logprobs": True,
            "return_token_ids": True,
        }
        async with gateway.http.post(f"{engine.url}/v1/chat/completions", json=direct | body) as response:
            own = await response.json()
    started, completed, _ = await story(kafka, session)
    assert isinstance(started, CallStarted) and isinstance(completed, CallCompleted)
    choice = own["choices"][0]
    assert unpack_ids(started.prompt_ids).tolist() == own["prompt_token_ids"]
    assert unpack_ids(completed.response_ids).tolist() == choice["token_ids"]
    reported = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(unpack_logprobs(completed.logprobs), reported, atol=1e-5)
    if not streamed:
        assert completed.message.get("content") == choice["message"]["content"]


async def test_a_second_call_is_recorded_as_what_is_new(tmp_path: Path, kafka: str, engine: RunningEngine) -> None:
    session = new_id()
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    async with stand(tmp_path, kafka, engine.url) as gateway:
        first = await gateway.chat(gateway.base(session), messages=messages, max_tokens=8)
        messages += [first.body["choices"][0]["message"], {"role": "user", "content": "and the quick fox"}]
        await gateway.chat(gateway.base(session), messages=messages, max_tokens=8)
        async with EngineClient(engine.url) as client:
            whole = (await token_api.render(client, {"model": "policy", "messages": messages})).token_ids
    calls = [event for event in await story(kafka, session) if isinstance(event, CallStarted)]
    answer = next(event for event in await story(kafka, session) if isinstance(event, CallCompleted))
    base = [*unpack_ids(calls[0].prompt_ids).tolist(), *unpack_ids(answer.response_ids).tolist()]
    assert [call.number for call in calls] == [0, 1]
    assert calls[1].base_call_id == calls[0].call_id and calls[1].tools is None
    assert base[: calls[1].kept_ids] + unpack_ids(calls[1].prompt_ids).tolist() == whole
    assert calls[1].kept_ids >= len(unpack_ids(calls[0].prompt_ids))
    assert [*messages[: calls[1].kept_messages], *calls[1].messages] == messages
    assert calls[1].kept_messages == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_is_cut_off_and_its_tokens_are_kept(
    tmp_path: Path, kafka: str, engine: RunningEngine, streamed: bool
) -> None:
    session, body = new_id(), {"max_tokens": 60, "seed": 5, "ignore_eos": True}
    async with stand(tmp_path, kafka, engine.url) as gateway:
        whole = (await gateway.chat(gateway.base(session), **body)).body["choices"][0]["message"]["content"]
        stop = next(character for character in whole[10:] if character.isascii() and character.isalnum())
        answer = await gateway.chat(gateway.base(session), stop=[stop], stream=streamed, **body)
    _, completed = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    text = answer.text() if streamed else answer.body["choices"][0]["message"]["content"]
    assert text == whole.partition(stop)[0] == completed.message["content"]
    assert completed.stop_reason == stop and completed.finish_reason == "stop"


async def test_kafka_that_is_away_refuses_the_call(tmp_path: Path, engine: RunningEngine) -> None:
    session = new_id()
    with LocalBroker(tmp_path / "broker") as broker:
        async with stand(tmp_path, broker.bootstrap, engine.url, publish_s=2.0) as gateway:
            assert (await gateway.chat(gateway.base(session), max_tokens=4)).status == 200
            broker.stop()
            refused = await gateway.chat(gateway.base(session), max_tokens=4)
    assert refused.status == 503 and refused.headers["Retry-After"] == "2"
    assert refused.body["error"]["code"] == "kafka_unavailable"


def drop_logprob(chunk: dict[str, Any]) -> dict[str, Any]:
    for choice in chunk["choices"]:
        choice["logprobs"]["content"] = choice["logprobs"]["content"][1:]
    return chunk


def drop_ids(chunk: dict[str, Any]) -> dict[str, Any]:
    for choice in chunk["choices"]:
        choice["token_ids"], choice["logprobs"] = None, None
    return chunk


def no_value(chunk: dict[str, Any]) -> dict[str, Any]:
    for choice in chunk["choices"]:
        for entry in choice["logprobs"]["content"]:
            entry["logprob"] = -9999.0
    return chunk


def no_version(chunk: dict[str, Any]) -> dict[str, Any]:
    for choice in chunk["choices"]:
        choice["weight_versions"] = choice["weight_versions"] and [
            span | {"version": "default"} for span in choice["weight_versions"]
        ]
    return chunk


@pytest.mark.parametrize("spoil", [drop_logprob, drop_ids, no_value, no_version])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_inexact_sample_fails_the_call(
    tmp_path: Path, kafka: str, engine: RunningEngine, spoil: Any, streamed: bool
) -> None:
    session = new_id()
    proxy = EngineProxy(engine.url)
    proxy.spoil = spoil
    async with proxy.running(), stand(tmp_path, kafka, proxy.url) as gateway:
        answer = await gateway.chat(gateway.base(session), stream=streamed, max_tokens=8)
    _, failed = await story(kafka, session)
    assert isinstance(failed, CallFailed) and failed.infrastructure and failed.reason == "inexact_sample"
    assert not answer.done and not answer.finish_reasons()
    error = answer.body["error"] if answer.body else answer.events[-1]["error"]
    assert error["code"] == "inexact_sample"
    assert answer.events or answer.status == 503


async def test_an_engine_that_dies_in_the_middle_fails_the_call(
    tmp_path: Path, kafka: str, engine: RunningEngine
) -> None:
    session = new_id()
    proxy = EngineProxy(engine.url)
    proxy.spoil = lambda chunk: chunk if len(proxy.streams[-1]) < 20 else None
    async with proxy.running(), stand(tmp_path, kafka, proxy.url) as gateway:
        answer = await gateway.chat(gateway.base(session), max_tokens=60, ignore_eos=True)
    _, failed = await story(kafka, session)
    assert isinstance(failed, CallFailed) and failed.infrastructure and failed.reason == "engine_unavailable"
    assert answer.status == 503 and answer.headers["Retry-After"] == "2"
    assert len(proxy.streams) == 1


async def test_an_engine_that_is_away_is_waited_for_then_refused(tmp_path: Path, kafka: str) -> None:
    session = new_id()
    async with stand(tmp_path, kafka, f"http://127.0.0.1:{free_port()}", engine_hold_s=1.0) as gateway:
        answer = await gateway.chat(gateway.base(session))
        async with gateway.http.get(f"{gateway.url}/health") as response:
            health = await response.json()
    started, failed = await story(kafka, session)
    assert answer.status == 503 and answer.headers["Retry-After"] == "2"
    assert answer.body["error"]["code"] == "engine_unavailable"
    assert isinstance(started, CallStarted) and started.prompt_ids == b""
    assert isinstance(failed, CallFailed) and failed.infrastructure
    assert health == {"status": "ok", "engine": False}


async def test_a_client_that_leaves_ends_the_sampling(tmp_path: Path, kafka: str, engine: RunningEngine) -> None:
    session = new_id()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, "ignore_eos": True}
    async with stand(tmp_path, kafka, engine.url) as gateway:
        for streamed in (True, False):
            url = f"{gateway.base(session)}/chat/completions"
            request = asyncio.create_task(gateway.http.post(url, json=body | {"stream": streamed}))
            if streamed:
                response = await request
                await response.content.readline()
                response.close()
            else:
                await story_until(kafka, session, CallStarted, 2)
                request.cancel()
        events = await story_until(kafka, session, CallDelivery, 2)
    deliveries = [event for event in events if isinstance(event, CallDelivery)]
    completed = {event.call_id: event for event in events if isinstance(event, CallCompleted)}
    assert [event.delivered for event in deliveries] == [False, False]
    for delivery in deliveries:
        call = completed[delivery.call_id]
        ids = unpack_ids(call.response_ids)
        assert call.finish_reason == "abort" and len(ids) < 1500
        assert len(unpack_logprobs(call.logprobs)) == len(ids)


async def test_an_ended_attempt_is_refused_and_its_calls_are_stopped(
    tmp_path: Path, kafka: str, engine: RunningEngine
) -> None:
    session, node = new_id(), {"node_id": "n", "incarnation": "i"}
    async with stand(tmp_path, kafka, engine.url) as gateway, Producer(kafka, source="test") as producer:
        base = gateway.base(session)
        running = asyncio.create_task(gateway.chat(base, stream=True, max_tokens=1500, ignore_eos=True))
        await story_until(kafka, session, CallStarted)
        await producer.send(SCHEDULER, SessionExited(session_id=session, attempt=0, **node))
        events = await story_until(kafka, session, CallDelivery)
        stopped, refused = await running, await gateway.chat(base)
        higher = await gateway.chat(gateway.base(session, attempt=1), max_tokens=4)
    assert isinstance(events[1], CallCompleted) and events[1].finish_reason == "abort"
    assert isinstance(events[2], CallDelivery) and not events[2].delivered
    assert stopped.events[-1]["error"]["code"] == "session_ended"
    assert not stopped.finish_reasons() and not stopped.done
    assert refused.status == 403 and refused.body["error"]["code"] == "session_ended"
    assert higher.status == 200
    async with stand(tmp_path, kafka, engine.url) as restarted:
        assert (await restarted.chat(restarted.base(session))).status == 403


async def test_call_numbers_go_on_after_a_restart(tmp_path: Path, kafka: str, engine: RunningEngine) -> None:
    session = new_id()
    task = TaskSpec(instruction="x", evaluator=EvaluatorSpec(command="true"))
    prewarm = Prewarm(session_id=session, attempt=0, node_id="n", incarnation="i", task=task, sample_index=0)
    async with Producer(kafka, source="test") as producer:
        await producer.send(SCHEDULER, prewarm)
    for _ in range(2):
        async with stand(tmp_path, kafka, engine.url) as gateway:
            await gateway.chat(gateway.base(session), max_tokens=4)
    calls = [event for event in await story(kafka, session) if isinstance(event, CallStarted)]
    assert [call.number for call in calls] == [0, 1]
    assert calls[1].base_call_id is None


async def test_the_models_are_those_of_the_engine(tmp_path: Path, kafka: str, engine: RunningEngine) -> None:
    async with stand(tmp_path, kafka, engine.url) as gateway:
        for url in (f"{gateway.base(new_id())}/models", f"{gateway.url}/v1/models"):
            async with gateway.http.get(url) as response:
                assert response.status == 200
                assert [model["id"] for model in (await response.json())["data"]] == ["policy"]


async def test_bad_requests_have_openais_shape(tmp_path: Path, kafka: str, engine: RunningEngine) -> None:
    session = new_id()
    async with stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        expired = await gateway.chat(gateway.base(session, ttl_s=-10))
        forged = await gateway.chat(f"{gateway.url}/s/{sign(SECRET[::-1], session, 0, 60)}/v1")
        several = await gateway.chat(base, n=2)
        no_messages = await gateway.chat(base, messages="hello")
        too_long = await gateway.chat(base, messages=[{"role": "user", "content": "word " * 5000}])
        unknown = await gateway.chat(f"{base}/completions")
        async with gateway.http.post(f"{base}/chat/completions", data=b"{") as response:
            cut = await response.json()
    answers = [expired, forged, several, no_messages, too_long, unknown]
    assert [answer.status for answer in answers] == [401, 401, 400, 400, 400, 404]
    assert all(answer.body["error"]["message"] and answer.body["error"]["type"] for answer in answers)
    assert "expired" in expired.body["error"]["message"] and several.body["error"]["param"] == "n"
    assert "not JSON" in cut["error"]["message"]
    _, failed = await story(kafka, session)
    assert isinstance(failed, CallFailed) and not failed.infrastructure and failed.reason == "context_overflow"
