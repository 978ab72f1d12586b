"""A real Kafka broker (KRaft, one node) as a child process, for one machine: no containers, data in the run folder.

``python -m streams.broker --run-dir D [--port P]`` runs it in the foreground until SIGTERM. Started again on the same
run folder it has the same data and the same ports. It dies with the thread that started it (Linux), and may be killed
at any moment: Kafka recovers its log. One node does not fsync each write, so a power cut may lose the last records.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import concurrent.futures
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import msgspec

from streams.admin import create_topics, wait_ready
from streams.errors import KafkaUnavailable, StreamError

HERE = Path(__file__).parent
START_S = 60.0
STOP_S = 20.0
FORMAT_S = 60.0
OLDEST_JAVA = 17
FULL_BYTES = 4 * 2**20
PORTS = range(20_000, 32_000)
LOG_BYTES = 10 * 2**20
HEAP = ("-Xms64m", "-Xmx512m")
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the program that it is given, which the kernel then kills when the thread that started it ends."""

log = logging.getLogger(__name__)

SYMPTOMS = (
    # The JVM's word for a memory-mapped file that could not grow.
    (
        r"No space left on device|fault occurred in .*unsafe memory access",
        "the disk that holds {data} is full; free some space, then start again",
    ),
    (r"Failed to acquire lock on file", "another broker already uses {data}; stop that one first"),
    (r"Address already in use", "port {port} or {controller_port} is taken; stop what listens there, or choose --port"),
    (r"OutOfMemoryError", "the broker's Java ran out of memory (512 MiB)"),
    (r"Invalid cluster.id|Inconsistent cluster", "{data} belongs to another cluster; use another run folder"),
)


class BrokerError(StreamError):
    """The broker cannot be started. One line: what, where, what to do."""


class Ports(msgspec.Struct, frozen=True):
    broker: int
    controller: int


class LocalBroker:
    """One broker on ``run_dir/kafka``. A context manager: started on entry, stopped on exit.

    ``libs`` is the folder of Kafka's jars, by default that of ``make setup``. Without ``port``, free ports are chosen
    once and remembered in the run folder.
    """

    def __init__(self, run_dir: Path, libs: Path | None = None, *, port: int | None = None) -> None:
        self._folder = Path(run_dir).absolute() / "kafka"
        self._libs = Path(libs) if libs is not None else default_libs()
        self._port = port
        self._ports: Ports | None = None
        self._java: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def bootstrap(self) -> str:
        """The address for clients, host:port."""
        if self._ports is None:
            raise RuntimeError("the broker was not started")
        return f"127.0.0.1:{self._ports.broker}"

    @property
    def pid(self) -> int | None:
        """The process id of the running Java, for whoever wants to kill it."""
        return self._java.pid if self._java is not None else None

    def start(self) -> str:
        """Starts the broker, waits until it serves, creates the topics, and returns the bootstrap address.

        Raises BrokerError: no Java or an old one, no jars, a port that is taken, a full disk, a second broker.
        """
        if self._java is not None and self._java.poll() is None:
            return self.bootstrap
        java = find_java()
        jars = self._jars()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._ports = self._choose_ports()
            self._format(java, jars, self._ports)
            properties = self._write_properties("server.properties", self._ports, self._data)
            self._java = self._launch(java, jars, properties)
        except OSError as error:
            raise BrokerError(
                f"Kafka in {self._folder} cannot start: {self._recognise(str(error)) or error}"
            ) from error
        try:
            _run(self._serve)
        except StreamError:
            self.stop()
            raise
        return self.bootstrap

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a deadline."""
        java, self._java = self._java, None
        if java is None or java.poll() is not None:
            return
        java.terminate()
        try:
            java.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the broker in %s does not stop: killing it", self._folder)
            java.kill()
            java.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        java, self._java = self._java, None
        if java is not None:
            java.kill()
            java.wait()

    def check(self) -> None:
        """Raises BrokerError when the broker has ended by itself."""
        if self._java is not None and self._java.poll() is not None:
            raise BrokerError(self._why_it_ended(self._java.returncode))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _serve(self) -> None:
        """Waits until the broker answers, watching that it lives."""
        end = time.monotonic() + START_S
        while True:
            self.check()
            try:
                await wait_ready(self.bootstrap, deadline_s=0.5)
                break
            except KafkaUnavailable as error:
                if time.monotonic() > end:
                    raise BrokerError(
                        f"Kafka did not answer at {self.bootstrap} within {START_S:.0f} s; see {self._log}"
                    ) from error
        try:
            await create_topics(self.bootstrap)
        except KafkaUnavailable:
            self.check()
            raise

    @property
    def _log(self) -> Path:
        return self._folder / "broker.log"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _jars(self) -> Path:
        if not any(self._libs.glob("kafka_2*.jar")):
            raise BrokerError(
                f"no Kafka jars in {self._libs}: run `make setup`, or set POLAR_KAFKA_LIBS to their folder"
            )
        return self._libs.absolute()

    def _choose_ports(self) -> Ports:
        remembered = self._folder / "ports.json"
        ports = None
        if remembered.exists():
            ports = msgspec.json.decode(remembered.read_bytes(), type=Ports)
        if ports is None:
            broker, controller = _free_ports(2)
            ports = Ports(self._port or broker, controller)
        elif self._port is not None:
            ports = Ports(self._port, ports.controller)
        for port in (ports.broker, ports.controller):
            if not _is_free(port):
                raise BrokerError(
                    f"port {port} of 127.0.0.1 is taken: stop what listens there (perhaps another broker on "
                    f"{self._folder}), or choose another port"
                )
        _replace(remembered, msgspec.json.encode(ports).decode())
        return ports

    def _write_properties(self, name: str, ports: Ports, data: Path) -> Path:
        values = {"broker_port": ports.broker, "controller_port": ports.controller, "data": data}
        template = (HERE / "server.properties").read_text()
        path = self._folder / name
        _replace(path, re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), template))
        return path

    def _format(self, java: str, jars: Path, ports: Ports) -> None:
        """Makes the data folder where there is none: whole, or not at all if it is killed."""
        if self._data.exists():
            return
        fresh = self._folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        properties = self._write_properties("format.properties", ports, fresh)
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = ("kafka.tools.StorageTool", "format", "--standalone", f"--cluster-id={cluster_id}")
        command = [java, *QUICK, "-cp", f"{jars}/*", _log4j(), *tool, "-c", str(properties)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BrokerError(f"formatting {self._data} took more than {FORMAT_S:.0f} s") from None
        if done.returncode != 0:
            said = " ".join((done.stderr + done.stdout).split())
            raise BrokerError(self._recognise(said) or f"formatting {self._data} failed: {said[-300:]}")
        fresh.replace(self._data)

    def _launch(self, java: str, jars: Path, properties: Path) -> subprocess.Popen[bytes]:
        if self._log.exists() and self._log.stat().st_size > LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        command = [java, *QUICK, *HEAP, "-cp", f"{jars}/*", _log4j(), "kafka.Kafka", str(properties)]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", BOUND_TO_PARENT, str(os.getpid()), *command]
        with self._log.open("ab") as out:
            self._log_start = out.tell()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )

    def _why_it_ended(self, code: int) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            said = file.read(LOG_BYTES).decode("utf-8", "replace")
        if shutil.disk_usage(self._folder).free < FULL_BYTES:
            said += "No space left on device"  # which the log itself had no room for
        why = self._recognise(said) or f"see {self._log}"
        return f"Kafka in {self._folder} ended with code {code}: {why}"

    def _recognise(self, said: str) -> str | None:
        ports = self._ports or Ports(0, 0)
        for pattern, advice in SYMPTOMS:
            if re.search(pattern, said):
                return advice.format(data=self._data, port=ports.broker, controller_port=ports.controller)
        return None


def default_libs() -> Path:
    """``POLAR_KAFKA_LIBS``, or the folder that ``make setup`` fills."""
    return Path(os.environ.get("POLAR_KAFKA_LIBS") or HERE.parent / ".cache/kafka/libs")


def find_java() -> str:
    """The ``java`` of PATH. Raises BrokerError when there is none, or one older than 17."""
    java = shutil.which("java")
    if java is None:
        raise BrokerError(
            "no java in PATH: Kafka needs a Java runtime of version 17 or newer (apt install default-jre)"
        )
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    version = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    major = 0 if version is None else int(version[2] or 0) if version[1] == "1" else int(version[1])
    if major < OLDEST_JAVA:
        raise BrokerError(f"{java} is Java {major or '?'}: Kafka needs version {OLDEST_JAVA} or newer")
    return java


def _log4j() -> str:
    return f"-Dlog4j2.configurationFile={HERE / 'log4j2.xml'}"


def _free_ports(n: int) -> list[int]:
    """Below the ports that the system gives to outgoing connections, which may come between here and the start."""
    chosen: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if _is_free(port):
            chosen.append(port)
        if len(chosen) == n:
            break
    return chosen


def _replace(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _run(serve: Callable[[], object]) -> None:
    """Runs the coroutine to its end, also where the caller's thread has an event loop of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(serve())).result()  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m streams.broker", description="Runs a local Kafka broker.")
    parser.add_argument("--run-dir", type=Path, required=True, help="its data lies in RUN_DIR/kafka")
    parser.add_argument("--port", type=int, help="of 127.0.0.1; by default a free one, remembered in the run folder")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    broker = LocalBroker(arguments.run_dir, port=arguments.port)
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        print(broker.start(), flush=True)
        while not stopping:
            broker.check()
            time.sleep(0.2)
    except StreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        broker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
