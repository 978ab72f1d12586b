"""What a gateway is measured on: Kafka and a scripted engine on one core, the gateway as its own process on another."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.gateway_load import CallFailed

ROOT = Path(__file__).resolve().parents[1]
SECRET = "a secret of the benchmark, long enough"
START_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


class StageError(Exception):
    """Something cannot be started. One line: what, and where its log is."""


class Cores(msgspec.Struct, frozen=True):
    """``rest`` has the engine, the load and Kafka."""

    gateway: int
    rest: int

    @staticmethod
    def choose() -> Cores:
        """The last two that this process may use. Raises StageError where there is one only."""
        free = sorted(os.sched_getaffinity(0))
        if len(free) < 2:
            raise StageError("the gateway needs a core of its own: this machine gives one core only")
        return Cores(gateway=free[-1], rest=free[-2])


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started inside runs on ``core``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def scripted_engine(folder: Path, plans: dict[str, Any], max_model_len: int) -> Iterator[str]:
    """Its URL. ``plans`` are those of each word that ends a prompt."""
    file = folder / "plans.json"
    file.write_bytes(msgspec.json.encode(plans))
    command = [sys.executable, str(ROOT / "tests/scripted_engine"), "--plans", str(file)]
    with (folder / "engine.log").open("wb") as log:
        process = _start([*command, "--max-model-len", str(max_model_len)], log, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise StageError(f"the scripted engine did not start: see {folder / 'engine.log'}")
        yield url
    finally:
        _stop(process)


class GatewayProcess:
    """The real gateway. CPU is that of the whole process, user and system."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self._process = process

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


@contextlib.contextmanager
def gateway(
    folder: Path, cores: Cores, engine_url: str, bootstrap: str, port: int, **settings: str
) -> Iterator[GatewayProcess]:
    """A gateway that answers; ``settings`` are POLAR_… variables in lower case."""
    url = f"http://127.0.0.1:{port}"
    given = {
        "run_dir": str(folder),
        "engine_url": engine_url,
        "kafka_bootstrap": bootstrap,
        "gateway_port": str(port),
        "session_secret": SECRET,
        **settings,
    }
    environment = os.environ | {f"POLAR_{name.upper()}": value for name, value in given.items()}
    with (folder / "gateway.log").open("ab") as log, on_core(cores.gateway):
        process = _start([sys.executable, "-m", "gateway_app.gateway"], log, environment, stdout=log)
    try:
        _wait_up(process, url, folder / "gateway.log")
        yield GatewayProcess(process, url)
    finally:
        _stop(process)


def _start(
    command: list[str], log: IO[bytes], environment: dict[str, str] | None = None, stdout: Any = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    raise StageError(f"the gateway did not start: see {log}")


__all__ = ["CallFailed", "Cores", "GatewayProcess", "StageError", "gateway", "on_core", "scripted_engine"]
