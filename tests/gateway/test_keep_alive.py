"""Who waits is told so by events of its own protocol, before the response starts and in its middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dialect_calls import EVENTS, Got, request, root, url
from engine_fixture import free_port
from gateway_stand import Stand, stand, story
from provider_clients import CLIENTS
from scripted_engine import Fault, Plan, ScriptedEngine

from schemas.ids import new_id
from schemas.sessions import CallDelivery

pytestmark = pytest.mark.kafka

TEXT = "a reply of a few words"
KEEP_ALIVES = {
    "openai.chat": b'"choices":[]}',
    "anthropic.messages": b"event: ping",
    "openai.responses": b"data: ",
    "google.generate": b'{"text":""}',
}

each_api = pytest.mark.parametrize("api", ["tokens", "chat"])
each_dialect = pytest.mark.parametrize("dialect", CLIENTS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEP_ALIVE_S", "HEADERS_S", "TICK_S"):
        monkeypatch.setattr(f"gateway_app.answers.{name}", 0.05)


@asynccontextmanager
async def asked(gateway: Stand, session: str, dialect: str) -> AsyncIterator[aiohttp.ClientResponse]:
    body = request(CLIENTS[dialect], streamed=True)
    async with gateway.http.post(url(root(gateway, session), dialect, streamed=True), json=body) as response:
        assert response.status == 200 and response.content_type == EVENTS
        yield response


async def read_until(response: aiohttp.ClientResponse, part: bytes, times: int) -> bytes:
    """What comes until ``part`` has come so often, whole events of it."""
    content = b""
    async with asyncio.timeout(20):
        while content.count(part) < times or not content.endswith(b"\n\n"):
            piece = await response.content.readany()
            assert piece, content
            content += piece
    return content


def check_whole(got: Got) -> None:
    assert got.text() == TEXT
    assert not any(line.startswith(b":") for line in got.content.splitlines()), "some programs do not count comments"


@each_api
@each_dialect
async def test_headers_and_keep_alives_come_before_there_is_an_engine(
    tmp_path: Path, kafka: str, api: Any, dialect: str
) -> None:
    port, session, engine = free_port(), new_id(), ScriptedEngine(Plan(content=TEXT))
    async with (
        stand(tmp_path, kafka, f"http://127.0.0.1:{port}", engine_api=api) as gateway,
        asked(gateway, session, dialect) as response,
    ):
        content = await read_until(response, KEEP_ALIVES[dialect], 3)
        async with engine.serving(port=port):
            content += await response.read()
    check_whole(Got(CLIENTS[dialect], 200, dict(response.headers), content))


@each_api
@each_dialect
async def test_keep_alives_come_while_the_engine_is_paused(tmp_path: Path, kafka: str, api: Any, dialect: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, fault=Fault("pause", after=4)))
    async with (
        engine.serving(),
        stand(tmp_path, kafka, engine.url, engine_api=api) as gateway,
        asked(gateway, session, dialect) as response,
    ):
        content = await read_until(response, b"a reply", 1)
        content += await read_until(response, KEEP_ALIVES[dialect], 3)
        assert engine.paused
        engine.resume()
        content += await response.read()
    check_whole(Got(CLIENTS[dialect], 200, dict(response.headers), content))
    events = await story(kafka, session)
    assert isinstance(events[-1], CallDelivery) and events[-1].delivered


@each_api
@each_dialect
async def test_after_keep_alives_an_error_is_no_end(tmp_path: Path, kafka: str, api: Any, dialect: str) -> None:
    session, away = new_id(), f"http://127.0.0.1:{free_port()}"
    async with (
        stand(tmp_path, kafka, away, engine_api=api, engine_hold_s=1.0) as gateway,
        asked(gateway, session, dialect) as response,
    ):
        got = Got(CLIENTS[dialect], 200, dict(response.headers), await response.read())
    assert KEEP_ALIVES[dialect] in got.content
    assert got.turn is None and got.error()["message"]


@each_dialect
async def test_a_response_that_is_not_streamed_has_no_keep_alives(tmp_path: Path, kafka: str, dialect: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT, first_s=0.5))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        body = request(CLIENTS[dialect])
        async with gateway.http.post(url(root(gateway, session), dialect, streamed=False), json=body) as response:
            got = Got(CLIENTS[dialect], response.status, dict(response.headers), await response.read())
    assert got.text() == TEXT and int(got.headers["Content-Length"]) == len(got.content)
