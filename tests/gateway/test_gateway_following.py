"""How the gateway follows the logs, on a real broker; the engine is away."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from engine_fixture import free_port
from gateway_stand import SECRET, Stand, stand
from session_stories import started

from gateway_app.attempts import Attempts
from gateway_app.following import Follower, call_numbers
from polar.session_token import sign
from schemas.record import Record
from schemas.scheduling import NodeHeartbeat, SessionExited, SessionRunning
from streams.broker import LocalBroker
from streams.codec import encode
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS

pytestmark = pytest.mark.kafka
NODE = {"node_id": "n", "incarnation": "i"}
AWAY = "http://127.0.0.1:9"


async def write_newer(kafka: str, record: Record) -> None:
    """As a program of the next major schema version would."""
    value, headers = encode(record, source="test")
    newer = [(name, b"2.0" if name == "schema_version" else text) for name, text in headers]
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(SCHEDULER, value, b"k", headers=newer)


async def test_the_logs_are_read_some_at_a_time_and_heartbeats_not_at_all(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Reader, "read_to_end")
    await write_newer(kafka, NodeHeartbeat(**NODE))
    async with Producer(kafka, source="test") as producer:
        for number in range(3):
            await producer.send(SCHEDULER, SessionRunning(session_id=f"s{number}", attempt=0, **NODE))
            await producer.send(SESSIONS, started(number, [1], session="s0"))
        await producer.send(SCHEDULER, SessionExited(session_id="s1", attempt=0, **NODE))
        attempts, failures = Attempts(), list[Exception]()
        async with Follower(kafka, attempts, failures.append) as follower:
            assert attempts.live() == {"s0": 0, "s2": 0}
            assert await call_numbers(kafka, attempts.live()) == {("s0", 0): 3}
            await write_newer(kafka, NodeHeartbeat(**NODE))
            await producer.send(SCHEDULER, SessionExited(session_id="s2", attempt=0, **NODE))
            async with asyncio.timeout(10):
                while not attempts.ended("s2", 0):
                    await asyncio.sleep(0.05)
            assert follower.alive and not failures


async def health(gateway: Stand) -> int:
    async with gateway.http.get(f"{gateway.url}/health") as response:
        return response.status


async def test_a_gateway_that_can_no_longer_follow_is_not_healthy(tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "broker") as broker:
        async with stand(tmp_path, broker.bootstrap, AWAY) as gateway:
            assert await health(gateway) == 200
            await write_newer(broker.bootstrap, SessionExited(session_id="s", attempt=0, **NODE))
            async with asyncio.timeout(10):
                while await health(gateway) == 200:
                    await asyncio.sleep(0.05)
            assert await health(gateway) == 503


async def test_a_process_that_can_no_longer_follow_ends_with_one_line(tmp_path: Path) -> None:
    port = free_port()
    with LocalBroker(tmp_path / "broker") as broker:
        process = gateway_process(tmp_path, broker.bootstrap, port)
        try:
            await wait_up(f"http://127.0.0.1:{port}/health")
            await write_newer(broker.bootstrap, SessionExited(session_id="s", attempt=0, **NODE))
            _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
        finally:
            process.kill()
            process.wait()
    (line,) = [line for line in stderr.splitlines() if "ERROR" in line]
    assert process.returncode == 1 and "Traceback" not in stderr
    assert "the scheduler's log is no longer followed" in line and "2.0" in line


def gateway_process(tmp_path: Path, kafka: str, port: int) -> subprocess.Popen[str]:
    settings = {
        "POLAR_RUN_DIR": str(tmp_path),
        "POLAR_KAFKA_BOOTSTRAP": kafka,
        "POLAR_ENGINE_URL": AWAY,
        "POLAR_GATEWAY_PORT": str(port),
    }
    argv = [sys.executable, "-m", "gateway_app.gateway"]
    return subprocess.Popen(argv, env=os.environ | settings, stderr=subprocess.PIPE, text=True)


async def wait_up(url: str) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url) as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


async def test_without_an_engine_a_list_of_models_is_refused_in_openais_shape(tmp_path: Path, kafka: str) -> None:
    async with stand(tmp_path, kafka, AWAY) as gateway:
        urls = [f"{gateway.url}/v1/models", f"{gateway.base('s')}/models"]
        urls.append(f"{gateway.url}/s/{sign(SECRET[::-1], 's', 0, 60)}/v1/models")
        answers = []
        for url in urls:
            async with gateway.http.get(url) as response:
                answers.append((response.status, (await response.json())["error"]["type"]))
    assert answers == [(503, "server_error"), (503, "server_error"), (401, "authentication_error")]
