"""What a session may not do is refused in the shape of each dialect, and what it may is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dialect_calls import ask, request, root
from gateway_stand import stand, story
from provider_clients import CLIENTS
from scripted_engine import Plan, ScriptedEngine

from schemas.ids import new_id
from schemas.scheduling import SessionExited
from schemas.sessions import CallCompleted, CallStarted
from schemas.tasks import Budget

pytestmark = pytest.mark.kafka

each_api = pytest.mark.parametrize("api", ["tokens", "chat"])
each_way = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
each_dialect = pytest.mark.parametrize("dialect", CLIENTS)

KINDS = {
    401: {"openai.chat": "authentication_error", "anthropic.messages": "authentication_error"},
    403: {"openai.chat": "permission_error", "anthropic.messages": "permission_error"},
    413: {"openai.chat": "invalid_request_error", "anthropic.messages": "request_too_large"},
    429: {"openai.chat": "rate_limit_error", "anthropic.messages": "rate_limit_error"},
}
STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED"}


def check_refused(got: Any, status: int) -> None:
    name, error = got.client.dialect.name, got.error()
    assert got.status == status and not got.streamed and error["message"]
    assert ("Retry-After" in got.headers) is (status == 429)
    if name == "google.generate":
        assert (error["code"], error["status"]) == (status, STATUSES[status])
    elif name == "openai.responses":
        assert error["type"] == KINDS[status]["openai.chat"]
    else:
        assert error["type"] == KINDS[status][name]


async def under_way(gateway: Any, count: int) -> None:
    async with asyncio.timeout(20):
        while len(gateway.gateway.serving.answers._open) < count:
            await asyncio.sleep(0.01)


@each_dialect
@each_way
async def test_a_body_over_the_limit(
    tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch, dialect: str, streamed: bool
) -> None:
    monkeypatch.setattr("gateway_app.serving.MAX_BODY", 50_000)
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session)
        assert (await ask(gateway, base, dialect, streamed=streamed)).text() == "fine"
        check_refused(await ask(gateway, base, dialect, streamed=streamed, ignored="x" * 50_000), 413)
    assert len(engine.sampled) == 1


@each_dialect
@each_way
async def test_more_calls_at_once_than_a_session_may_have(
    tmp_path: Path, kafka: str, dialect: str, streamed: bool
) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session, budget=Budget(concurrent_calls=1))
        engine.pause()
        first = asyncio.create_task(ask(gateway, base, dialect, streamed=streamed))
        await under_way(gateway, 1)
        check_refused(await ask(gateway, base, dialect, streamed=streamed, ignored=1), 429)
        repeat = asyncio.create_task(ask(gateway, base, dialect, streamed=streamed))
        other = asyncio.create_task(ask(gateway, root(gateway, new_id()), dialect, streamed=streamed))
        await under_way(gateway, 2)
        engine.resume()
        assert {got.text() for got in await asyncio.gather(first, repeat, other)} == {"fine"}
        assert (await ask(gateway, base, dialect, streamed=streamed, ignored=1)).text() == "fine"
    assert len(engine.sampled) == 3


@each_dialect
async def test_a_budget_of_calls(tmp_path: Path, kafka: str, dialect: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session, budget=Budget(calls=2))
        engine.pause()
        same = [asyncio.create_task(ask(gateway, base, dialect)) for _ in range(3)]
        await under_way(gateway, 1)
        engine.resume()
        assert [got.text() for got in await asyncio.gather(*same)] == ["fine"] * 3, "joins do not count"
        broken = await ask(gateway, base, dialect, body={"model": "m"})
        assert broken.status == 400, "what became no call does not count"
        assert (await ask(gateway, base, dialect)).text() == "fine"
        check_refused(await ask(gateway, base, dialect), 403)
        check_refused(await ask(gateway, base, dialect, streamed=True), 403)
    calls = [event for event in await story(kafka, session) if isinstance(event, CallStarted)]
    assert len(calls) == len(engine.sampled) == 2


@each_api
@each_way
async def test_a_budget_of_tokens_is_kept_to_the_token(tmp_path: Path, kafka: str, api: Any, streamed: bool) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="abc " * 50))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        base = root(gateway, session, budget=Budget(tokens=30))
        for most in (20, 30_000):
            got = await ask(gateway, base, "openai.chat", streamed=streamed, max_tokens=most)
            assert got.turn is not None
        refused = await ask(gateway, base, "openai.chat", streamed=streamed)
    check_refused(refused, 403)
    assert [len(one.ids) for one in engine.sampled] == [20, 10]
    completed = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    assert [event.finish_reason for event in completed] == ["length"] * 2


@each_dialect
async def test_a_closed_session_and_a_wrong_token(tmp_path: Path, kafka: str, dialect: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session)
        assert (await ask(gateway, base, dialect)).text() == "fine"
        exited = SessionExited(session_id=session, attempt=0, node_id="n", incarnation="i")
        gateway.gateway.serving.attempts.evolve(exited)
        for streamed in (False, True):
            check_refused(await ask(gateway, base, dialect, streamed=streamed), 403)
            check_refused(await ask(gateway, f"{base[:-4]}AAAA", dialect, streamed=streamed), 401)
        assert not gateway.gateway.serving.budgets._attempts
    assert len(engine.sampled) == 1


@each_dialect
async def test_what_is_counted_is_no_call(tmp_path: Path, kafka: str, dialect: str) -> None:
    """Only two dialects have a count; the others have no such path."""
    paths = {
        "anthropic.messages": ("v1/messages/count_tokens", "input_tokens"),
        "google.generate": ("v1beta/models/m:countTokens", "totalTokens"),
    }
    if dialect not in paths:
        return
    path, name = paths[dialect]
    session, engine = new_id(), ScriptedEngine(Plan(content="fine"))
    for api in ("tokens", "chat"):
        async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
            base, body = root(gateway, session, budget=Budget(calls=1)), request(CLIENTS[dialect])
            counts = []
            for _ in range(3):
                async with gateway.http.post(f"{base}/{path}", json=body) as response:
                    counts.append((await response.json())[name])
            await ask(gateway, base, dialect)
        assert set(counts) == {len(engine.sampled[-1].prompt_ids)}
        session = new_id()
