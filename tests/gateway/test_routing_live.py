"""The gateway over real HTTP: how programs spell its URLs, what it does not have, models, metrics, Google's arrays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dialect_calls import PATHS, ask, request, root
from gateway_stand import Stand, stand, story
from prometheus_client.parser import text_string_to_metric_families
from provider_clients import CLIENTS
from scripted_engine import Fault, Plan, ScriptedEngine

from schemas.ids import new_id
from schemas.sessions import CallStarted

pytestmark = pytest.mark.kafka

TEXT = "a reply of a few words"
each_dialect = pytest.mark.parametrize("dialect", CLIENTS)


OPENAI = {"error": {"message", "type", "param", "code"}}
SHAPES: dict[str, dict[str, Any]] = {
    "openai.chat": OPENAI,
    "openai.responses": OPENAI,
    "anthropic.messages": {"type": "error", "error": {"type", "message"}},
    "google.generate": {"error": {"code", "message", "status", "details"}},
}


def shape(answer: dict[str, Any]) -> dict[str, Any]:
    """The names of an error's fields."""
    return answer | {"error": set(answer["error"])}


async def send(gateway: Stand, method: str, url: str, **options: Any) -> tuple[int, str, bytes]:
    async with gateway.http.request(method, url, **options) as response:
        return response.status, response.content_type, await response.read()


async def test_the_base_says_hello(tmp_path: Path, kafka: str) -> None:
    engine = ScriptedEngine()
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, new_id())
        for url in (gateway.url, f"{gateway.url}/", base, f"{base}/", f"{base}/v1", f"{base}/api/hello"):
            status, kind, content = await send(gateway, "GET", url)
            assert (status, kind) == (200, "application/json") and json.loads(content)
            assert await send(gateway, "HEAD", url) == (200, "application/json", b"")
        assert (await send(gateway, "GET", f"{base[:-4]}AAAA/api/hello"))[0] == 401


async def test_a_websocket_is_told_to_fall_back(tmp_path: Path, kafka: str) -> None:
    engine = ScriptedEngine()
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        for path in ("/v1/responses", "/v1/realtime", ""):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await gateway.http.ws_connect(root(gateway, new_id()) + path)
            assert refused.value.status == 426


@pytest.mark.parametrize(
    ("method", "path", "status", "dialect"),
    [
        ("POST", "v1/completions", 404, "openai.chat"),
        ("POST", "v1/embeddings", 404, "openai.chat"),
        ("GET", "v1/chat/completions", 405, "openai.chat"),
        ("GET", "v1/responses/resp_1", 404, "openai.responses"),
        ("DELETE", "v1/responses", 405, "openai.responses"),
        ("POST", "v1/messages/batches", 404, "anthropic.messages"),
        ("PUT", "v1/messages", 405, "anthropic.messages"),
        ("POST", "v1beta/models/m:embedContent", 404, "google.generate"),
        ("GET", "v1beta/models/m:generateContent", 405, "google.generate"),
    ],
)
async def test_what_there_is_not_is_refused_in_the_dialects_shape(
    tmp_path: Path, kafka: str, method: str, path: str, status: int, dialect: str
) -> None:
    session, engine = new_id(), ScriptedEngine()
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        body = request(CLIENTS["openai.chat"])
        told, kind, content = await send(gateway, method, f"{root(gateway, session)}/{path}", json=body)
    answer = json.loads(content)
    assert (told, kind) == (status, "application/json") and path.split("/")[1] in answer["error"]["message"]
    assert shape(answer) == SHAPES[dialect]
    assert not engine.sampled and not await story(kafka, session)


@each_dialect
async def test_slashes_versions_and_queries_are_tolerated(tmp_path: Path, kafka: str, dialect: str) -> None:
    engine, path = ScriptedEngine(Plan(content=TEXT)), PATHS[dialect]
    bare = path.partition("/")[2]
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base, body = root(gateway, new_id()), request(CLIENTS[dialect])
        for number, spelled in enumerate([f"/{path}", f"//{path}", f"/v1//{path}/", f"/{path}?beta=true", f"/{bare}"]):
            told = await send(gateway, "POST", base + spelled, json=body | {"ignored": number})
            assert told[0] == 200, (spelled, told)
    assert len(engine.sampled) == 5


@each_dialect
async def test_the_token_may_be_the_api_key(tmp_path: Path, kafka: str, dialect: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        token = root(gateway, session).rpartition("/")[2]
        keys: list[dict[str, str]] = [
            {"Authorization": f"Bearer {token}"},
            {"x-api-key": token},
            {"x-goog-api-key": token},
        ]
        for number, headers in enumerate(keys):
            got = await ask(gateway, gateway.url, dialect, headers=headers, ignored=number)
            assert got.text() == TEXT
        query = f"{gateway.url}/{PATHS[dialect]}?key={token}"
        assert (await send(gateway, "POST", query, json=request(CLIENTS[dialect])))[0] == 200
        without = await ask(gateway, gateway.url, dialect)
        assert without.status == 401 and without.error()["message"]
    assert sum(isinstance(event, CallStarted) for event in await story(kafka, session)) == 4


async def test_models_are_listed_in_each_shape(tmp_path: Path, kafka: str) -> None:
    engine = ScriptedEngine(max_model_len=4096)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, new_id())

        async def get(path: str) -> Any:
            status, _, content = await send(gateway, "GET", f"{base}/{path}")
            assert status == 200
            return json.loads(content)

        assert [one["id"] for one in (await get("v1/models"))["data"]] == ["policy"]
        assert (await get("v1/models/org/any"))["id"] == "org/any"
        (listed,) = (await get("v1beta/models"))["models"]
        assert listed["name"] == "models/policy" and listed["inputTokenLimit"] == 4096
        assert (await get("v1beta/models/any"))["name"] == "models/any"


async def test_metrics_count_what_happened(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session)
        engine.pause()
        same = [asyncio.create_task(ask(gateway, base, "openai.chat", streamed=True)) for _ in range(3)]
        async with asyncio.timeout(20):
            while gateway.gateway.serving.metrics._joined._value.get() < 2:
                await asyncio.sleep(0.01)
        engine.resume()
        await asyncio.gather(*same)
        title = [{"role": "system", "content": "You are a title generator. You output ONLY a thread title."}]
        await ask(gateway, base, "openai.chat", messages=[*title, {"role": "user", "content": "hi"}], tools=[])
        unknown = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "never said"}]
        await ask(gateway, base, "openai.chat", messages=[*unknown, {"role": "user", "content": "and?"}])
        engine.fail_next("generate", Fault("status"))
        await ask(gateway, base, "anthropic.messages")
        await ask(gateway, f"{base[:-4]}AAAA", "anthropic.messages")
        status, kind, content = await send(gateway, "GET", f"{gateway.url}/metrics")
    families = text_string_to_metric_families(content.decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(one.name.removeprefix("polar_gateway_"), *sorted(one.labels.values())): one.value for one in samples}
    assert (status, kind) == (200, "text/plain")
    assert found["calls_total", "completed", "openai.chat"] == 3
    assert found["calls_total", "anthropic.messages", "engine_fault"] == 1
    assert found["refusals_total", "invalid_session_token"] == 1
    assert found["retries_total", "joined"] == 2
    assert found["auxiliary_calls_total", "opencode.title"] == 1
    assert found["history_splits_total", "unknown_history"] == 1
    assert found["tokens_total", "sampled"] == sum(len(one.ids) for one in engine.sampled[:3])
    assert found["tokens_total", "prompt"] == sum(len(one.prompt_ids) for one in engine.sampled[:3])
    assert found["added_seconds_count", "first_token"] == 1
    assert found["calls_in_flight",] == 0
    assert found["publish_seconds_count", "call.started"] == 4


@pytest.mark.parametrize("api", ["tokens", "chat"])
async def test_a_google_stream_without_sse_is_one_array(tmp_path: Path, kafka: str, api: Any) -> None:
    engine = ScriptedEngine(Plan(content=TEXT, calls=[("read", {"path": "a"})], between_s=0.001))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        url = f"{root(gateway, new_id())}/v1beta/models/m:streamGenerateContent"
        body = request(CLIENTS["google.generate"])
        both = [send(gateway, "POST", url, json=body), send(gateway, "POST", f"{url}?alt=sse", json=body)]
        (status, kind, content), (_, events, _) = await asyncio.gather(*both)
        engine.fail_next("generate" if api == "tokens" else "chat", Fault("cut", after=3))
        cut = await send(gateway, "POST", f"{url}?alt=json", json=body)
    assert (status, kind, events) == (200, "application/json", "text/event-stream")
    candidates = [element["candidates"][0] for element in json.loads(content)]
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    assert "".join(part.get("text", "") for part in parts).rstrip("\n") == TEXT
    assert [part["functionCall"]["name"] for part in parts if "functionCall" in part] == ["read"]
    assert "finishReason" in candidates[-1] and len(engine.sampled) == 3
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut[2])
    assert json.loads(cut[2] + b"]")[-1]["error"]["status"] == "UNAVAILABLE"
