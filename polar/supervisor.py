"""Runs the services of one run folder as processes, and brings back those that die.

Each service is a child in its own process group, its output in ``logs/NAME.log``, its pid in ``pids/NAME.pid``. A child
dies with the supervisor: the kernel kills it when the thread that started it ends, so call from one long-lived thread.
A service that ends by itself is started again on the same port after a growing delay; one that crashes too often, or
that ends before it was ever ready, stops everything with its last log lines. Nothing in the run folder is deleted.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 0.1
READY = "ready"
"""The line by which a service without a URL says that it has started."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class SupervisorError(Exception):
    """One line: what, where, and what to do."""


class ServiceFailed(SupervisorError):
    """A service does not stay up. ``log_tail`` holds the last lines that it wrote."""

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One process. It starts, also again, when all of ``needs`` are ready.

    Ready means: ``ready_url`` answers 200, or ``ready_line`` is a line of its log since this start; else, alive.
    """

    name: str
    argv: list[str]
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    ready_url: str | None = None
    ready_line: str | None = None
    ready_s: float = 60.0
    stop_s: float = 10.0


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """More than ``crashes`` within ``window_s`` is too many. The delay doubles from first to longest."""

    crashes: int = 6
    window_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0

    def delay(self, crash_times: Sequence[float], now: float) -> float | None:
        """Seconds to wait after the crash at ``crash_times[-1]``; None when there were too many of late."""
        recent = [t for t in crash_times if t > now - self.window_s]
        if len(recent) > self.crashes:
            return None
        return min(self.first_delay_s * 2 ** max(0, len(recent) - 1), self.longest_delay_s)


class _Running:
    """The changing side of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.was_ready = False
        self.started_at = 0.0
        self.log_start = 0
        self.crash_times: list[float] = []
        self.restart_at: float | None = None


class Supervisor:
    """Starts ``services`` in the order of their needs, keeps them up, stops them in reverse order.

    Raises SupervisorError when another supervisor runs on ``run_dir``, ServiceFailed when a service does not stay up.
    """

    def __init__(
        self,
        services: Sequence[Service],
        run_dir: Path,
        *,
        environment: dict[str, str] | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.environment = dict(os.environ) if environment is None else environment
        self.policy = policy or RestartPolicy()
        self._running = {service.name: _Running(service) for service in services}
        self._started: list[str] = []
        self._lock: IO[str] | None = None

    def __enter__(self) -> Supervisor:
        self._take_lock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def restarts(self) -> dict[str, int]:
        """How often each service was started again."""
        return {name: len(running.crash_times) for name, running in self._running.items()}

    @property
    def not_ready(self) -> list[str]:
        return [name for name, running in self._running.items() if not running.ready]

    def is_running(self, name: str) -> bool:
        """Whether it has a process, as of the last ``poll``."""
        return self._running[name].process is not None

    def log_path(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    def pid_path(self, name: str) -> Path:
        return self.run_dir / "pids" / f"{name}.pid"

    def log_tail(self, name: str, lines: int = 12) -> str:
        """The last lines that the service wrote."""
        path = self.log_path(name)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def start(self, on_ready: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        """Starts everything and returns when all of it is ready. ``on_ready`` gets each name and its seconds."""
        told: set[str] = set()
        while self.not_ready:
            self.poll()
            for name, running in self._running.items():
                if running.ready and name not in told:
                    told.add(name)
                    on_ready(name, time.monotonic() - running.started_at)
            time.sleep(LOOK_EVERY_S)

    def poll(self) -> None:
        """One look at every service: starts what may start, notes what is ready, and deals with what has ended."""
        now = time.monotonic()
        for name, running in self._running.items():
            if running.process is None:
                self._start_when_due(running, now)
            elif _has_ended(running.process):
                self._ended(running, now)
            elif not running.ready:
                self._check_ready(name, running, now)

    def stop(self) -> None:
        """SIGTERM to each in reverse order of starting, SIGKILL to its group when ``stop_s`` is over."""
        for name in reversed(self._started):
            running = self._running[name]
            if running.process is not None:
                _end(running.process, running.service.stop_s)
                running.process = None
            self.pid_path(name).unlink(missing_ok=True)
        self._started = []
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        for folder in ("logs", "pids"):
            (self.run_dir / folder).mkdir(parents=True, exist_ok=True)
        path = self.run_dir / "supervisor.lock"
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise SupervisorError(
                f"{self.run_dir} is in use by process {holder}: stop that first, or give another --run-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _start_when_due(self, running: _Running, now: float) -> None:
        if any(not self._running[need].ready for need in running.service.needs):
            return
        if running.restart_at is None or now >= running.restart_at:
            self._spawn(running, now)

    def _spawn(self, running: _Running, now: float) -> None:
        service, parent = running.service, os.getpid()
        log = self.log_path(service.name)
        with log.open("ab") as output:
            running.log_start = output.tell()
            running.process = subprocess.Popen(
                service.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **service.environment},
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509  it calls prctl only
            )
        running.started_at, running.restart_at = now, None
        if service.name not in self._started:
            self._started.append(service.name)
        pid_file = self.pid_path(service.name)
        fresh = pid_file.with_suffix(".new")
        fresh.write_text(str(running.process.pid))
        fresh.replace(pid_file)

    def _check_ready(self, name: str, running: _Running, now: float) -> None:
        if self._is_ready(name, running):
            running.ready = running.was_ready = True
        elif now - running.started_at > running.service.ready_s:
            raise ServiceFailed(
                f"{name} is not ready after {running.service.ready_s:.0f} s: see {self.log_path(name)}",
                self.log_tail(name),
            )

    def _is_ready(self, name: str, running: _Running) -> bool:
        service = running.service
        if service.ready_url is not None:
            return _answers(service.ready_url)
        if service.ready_line is not None:
            with self.log_path(name).open("rb") as file:
                file.seek(running.log_start)
                return service.ready_line.encode() in file.read().splitlines()
        return True

    def _ended(self, running: _Running, now: float) -> None:
        name, process = running.service.name, running.process
        assert process is not None
        code = _reap(process)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        running.process, running.ready = None, False
        running.crash_times.append(now)
        where = self.log_path(name)
        if not running.was_ready and code > 0:
            raise ServiceFailed(f"{name} did not start ({how}): see {where}", self.log_tail(name))
        delay = self.policy.delay(running.crash_times, now)
        if delay is None:
            raise ServiceFailed(
                f"{name} ended {self.policy.crashes + 1} times within {self.policy.window_s:.0f} s"
                f" (last by {how}): see {where}",
                self.log_tail(name),
            )
        running.restart_at = now + delay


def _die_with(parent: int) -> None:
    """In the child, before exec: SIGKILL when the parent's thread ends, also when that has happened already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping, so that the process group's number stays taken."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Kills what is left of an ended process's group, so that its ports are free. Returns the exit code."""
    _signal_group(process, signal.SIGKILL)
    return process.wait()


def _end(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    os.kill(process.pid, signal.SIGTERM)  # Popen's own way would reap one that has ended already
    deadline = time.monotonic() + deadline_s
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    _reap(process)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
