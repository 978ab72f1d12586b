"""What has to be gone when a run is over: a pid namespace, or a unix session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from polar.runtimes.runtime import RuntimeFault

KILL_DEADLINE_S = 10.0
POLL_S = 0.02


class Tree(Protocol):
    """A started command and everything that it starts."""

    async def opened(self) -> None:
        """Returns when the tree's first process is known, or can never be. May be called again."""
        ...

    def processes(self) -> Iterable[Path]:
        """The /proc folders of its processes, as far as they can be seen."""
        ...

    def kill(self) -> None:
        """SIGKILL to all of it."""
        ...

    async def gone(self) -> None:
        """Returns when no process is left. Raises RuntimeFault after KILL_DEADLINE_S."""
        ...

    def exit_code(self, returncode: int | None) -> int | None:
        """The command's own, or None when it never ran; ``returncode`` is that of the started process."""
        ...


class Namespace:
    """A pid namespace made by bubblewrap, which writes two JSON lines: its first process, and the exit code."""

    def __init__(self, status_read: int) -> None:
        self._status_read = status_read
        self._status = b""
        self._first: int | None = None
        self._pidfd: int | None = None

    async def opened(self) -> None:
        while b"\n" not in self._status:
            if not await readable(self._status_read, KILL_DEADLINE_S) or not self._read():
                return
        if self._first is not None:
            return
        self._first = json.loads(self._status.splitlines()[0])["child-pid"]
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self._first)

    def processes(self) -> Iterable[Path]:
        if self._pidfd is None:
            return ()
        return _numbered(Path(f"/proc/{self._first}/root/proc"))

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def gone(self) -> None:
        try:
            if self._pidfd is not None and not await readable(self._pidfd, KILL_DEADLINE_S):
                raise RuntimeFault(f"the sandbox of process {self._first} did not end within {KILL_DEADLINE_S:g} s")
            while await readable(self._status_read, KILL_DEADLINE_S) and self._read():
                pass
        finally:
            os.close(self._status_read)
            if self._pidfd is not None:
                os.close(self._pidfd)

    def exit_code(self, returncode: int | None) -> int | None:
        for line in self._status.splitlines():
            if (code := json.loads(line).get("exit-code")) is not None:
                return int(code)
        return None

    def _read(self) -> bytes:
        chunk = os.read(self._status_read, 65536)
        self._status += chunk
        return chunk


class UnixSession:
    """The processes whose session is ``leader``'s; one that called setsid is not among them."""

    def __init__(self, leader: int) -> None:
        self._leader = leader

    async def opened(self) -> None:
        pass

    def processes(self) -> Iterable[Path]:
        return [folder for folder in _numbered(Path("/proc")) if _session(folder) == self._leader]

    def kill(self) -> None:
        for folder in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)

    async def gone(self) -> None:
        for _ in range(int(KILL_DEADLINE_S / POLL_S)):
            if not self.processes():
                return
            self.kill()
            await asyncio.sleep(POLL_S)
        raise RuntimeFault(f"processes of session {self._leader} did not end within {KILL_DEADLINE_S:g} s")

    def exit_code(self, returncode: int | None) -> int | None:
        return returncode


def kill_left_behind(folder: Path) -> int:
    """SIGKILL to every bubblewrap that mounts something below ``folder``; each is the first process of its namespace
    or watches it. bubblewrap misses the death of its parent in the moment before it asks to be told of it.
    """
    killed = 0
    below = f"{folder}/".encode()
    for process in _numbered(Path("/proc")):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"bwrap") and any(word.startswith(below) for word in words):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
    return killed


def resident_bytes(processes: Iterable[Path]) -> int:
    """Anonymous and shared memory that is resident, without mapped files; shared pages count once a process."""
    total = 0
    for folder in processes:
        with contextlib.suppress(OSError):
            for line in (folder / "status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def _numbered(proc: Path) -> list[Path]:
    try:
        return [proc / name for name in os.listdir(proc) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return []


def _session(folder: Path) -> int | None:
    """The session of a process; None for one that is gone or only waits to be reaped."""
    try:
        state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
    except OSError:
        return None
    return None if state in "ZX" else int(session)


async def readable(descriptor: int, deadline_s: float) -> bool:
    """Whether the descriptor became readable (a pidfd: its process ended; a pipe: data or end) in time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await asyncio.wait({ready}, timeout=deadline_s)
        return ready.done()
    finally:
        loop.remove_reader(descriptor)
