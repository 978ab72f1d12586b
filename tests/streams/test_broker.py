"""The local broker itself: kills, restarts, and each way in which it cannot start."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.ids import new_id
from schemas.sessions import SessionClosed
from streams.broker import BrokerError, LocalBroker, find_java
from streams.consumer import GroupReader, Reader
from streams.errors import KafkaUnavailable
from streams.producer import Producer
from streams.topics import MIB, SESSIONS

pytestmark = pytest.mark.kafka


def closed(session_id: str, reason: str = "") -> SessionClosed:
    return SessionClosed(session_id=session_id, attempt=0, outcome="completed", reason=reason)


async def test_killed_in_the_middle_of_writing_it_loses_and_doubles_nothing(tmp_path):
    with LocalBroker(tmp_path) as broker:
        bootstrap, session = broker.bootstrap, new_id()
        async with (
            Reader(bootstrap, [SESSIONS], source="test", start="end") as reader,
            Producer(bootstrap, source="test") as producer,
        ):
            before = [await producer.post(SESSIONS, closed(session, str(n))) for n in range(200)]
            await before[50]
            broker.kill()
            during = [await producer.post(SESSIONS, closed(session, str(n))) for n in range(200, 300)]
            assert broker.start() == bootstrap
            await asyncio.gather(*before, *during)
            received = await reader.read_to_end()
        assert [one.record.reason for one in received] == [str(n) for n in range(300)]


async def test_a_broker_that_is_gone_is_an_error_within_the_deadline(tmp_path):
    with LocalBroker(tmp_path) as broker:
        async with Producer(broker.bootstrap, source="test", deadline_s=1.0) as producer:
            await producer.send(SESSIONS, closed("s"))
            broker.kill()
            with pytest.raises(KafkaUnavailable, match=rf"{broker.bootstrap}.*writing a SessionClosed"):
                await producer.send(SESSIONS, closed("s"))


@pytest.mark.parametrize("group_id", [None, "group"])
async def test_a_reader_hears_that_the_broker_is_silent(tmp_path, monkeypatch, group_id):
    monkeypatch.setattr("streams.polling.SILENCE_S", 1.0)
    with LocalBroker(tmp_path) as broker:
        if group_id is None:
            reader = Reader(broker.bootstrap, [SESSIONS], source="test", start="end")
        else:
            reader = GroupReader(broker.bootstrap, [SESSIONS], source="test", group_id=group_id)
        async with reader:
            assert await reader.poll(0.5) == []
            broker.kill()
            with pytest.raises(KafkaUnavailable, match=f"{broker.bootstrap}.*no answer"):
                async with asyncio.timeout(60):
                    while True:
                        await reader.poll(0.2)


def test_the_lines_of_a_broker_that_is_away_are_logged_once_in_a_while(caplog):
    for _ in range(5):
        logging.getLogger("aiokafka.client").error("Unable connect to node with id %s: %s", 1, "refused")
    logging.getLogger("aiokafka.client").error("another line")
    assert [record.getMessage() for record in caplog.records] == [
        "Unable connect to node with id 1: refused",
        "another line",
    ]


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def ended(pid_descriptor: int, within_s: float) -> bool:
    return bool(select.select([pid_descriptor], [], [], within_s)[0])


@pytest.fixture
def command(tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-m", "streams.broker", "--run-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    yield started
    started.kill()
    started.wait()


def test_the_command_prints_its_address_refuses_a_second_one_and_stops_on_sigterm(command, tmp_path):
    host, port = command.stdout.readline().split(":")
    assert socket.create_connection((host, int(port)), timeout=5).close() is None
    with pytest.raises(BrokerError, match=rf"port {port.strip()} .*taken.*{tmp_path}"):
        LocalBroker(tmp_path).start()
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_java_dies_with_a_command_that_is_killed(command):
    command.stdout.readline()
    java = os.pidfd_open(child_of(command.pid))
    try:
        command.kill()
        assert ended(java, within_s=30)
    finally:
        os.close(java)


def test_a_command_that_cannot_start_says_so_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "streams.broker", "--run-dir", str(tmp_path)],
        env=os.environ | {"POLAR_KAFKA_LIBS": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: no Kafka jars in {tmp_path}/none: run `make setup`, or set POLAR_KAFKA_LIBS to their folder\n"
    )


def test_no_java_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match="no java in PATH"):
        LocalBroker(tmp_path).start()


@pytest.mark.parametrize(("version", "major"), [("11.0.2", "11"), ("1.8.0_292", "8")])
def test_an_old_java_is_said(monkeypatch, tmp_path, version, major):
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match=rf"Java {major}: .*17"):
        find_java()


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} .*taken"):
            LocalBroker(tmp_path, port=port).start()


@pytest.fixture
def small_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_full_disk_is_said(small_disk):
    with LocalBroker(small_disk) as broker:
        async with Producer(broker.bootstrap, source="test", deadline_s=3.0) as producer:
            with pytest.raises(KafkaUnavailable):
                for _ in range(20):
                    await producer.send(SESSIONS, closed("s", os.urandom(MIB // 2).hex()))
        with pytest.raises(BrokerError, match=rf"disk that holds {small_disk}.* is full"):
            broker.check()
    with pytest.raises(BrokerError, match=rf"disk that holds {small_disk}.* is full"):
        broker.start()
