"""Runs one command with everything that it starts, and ends all of it.

Under bubblewrap the tree is a pid namespace: killing its first process makes the kernel kill every other, also those
that daemonised, and that first process only turns into a zombie after them. Without bubblewrap the tree is a unix
session, and a process that calls setsid escapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

from polar.runtimes.runtime import Ended, RuntimeFault
from polar.runtimes.trees import KILL_DEADLINE_S, Namespace, Tree, UnixSession, readable, resident_bytes

MEMORY_CHECK_S = 0.25
DRAIN_S = 1.0
"""For output that is still in the pipe; a process that escaped a unix session may hold it open for ever."""
KEPT_BYTES = 2 * 4096
"""Of each output stream; more than is reported, so that a secret is still whole where it is cut out."""

Verdict = Literal["exited", "deadline", "memory"]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """``argv`` gets the number of a file descriptor for bubblewrap's status, or None without bubblewrap."""

    argv: Callable[[int | None], list[str]]
    confined: bool
    environment: dict[str, str]
    cwd: Path
    stdin: str
    deadline_s: float
    memory_bytes: int


async def run_tree(launch: Launch) -> Ended:
    """Runs until the command ends, its deadline or its memory limit is reached; then nothing of its tree is left.

    Must be called from the thread that lives as long as the process: the kernel kills the tree when it ends.
    Raises RuntimeFault when the sandbox could not be set up, or its tree would not end.
    """
    started = time.monotonic()
    process, tree = _start(launch)
    pidfd = os.pidfd_open(process.pid)
    stdout, stderr = Tail(), Tail()
    try:
        await stdout.read(process.stdout)
        await stderr.read(process.stderr)
        await tree.opened()
        verdict = await _watch(pidfd, launch, tree, started)
    finally:
        await tree.opened()  # a start that was cancelled: only the first process, once known, can be ended surely
        tree.kill()
        process.kill()
        await tree.gone()
        await readable(pidfd, KILL_DEADLINE_S)
        process.wait()
        os.close(pidfd)
        await asyncio.wait({stdout.ended, stderr.ended}, timeout=DRAIN_S)
        stdout.close()
        stderr.close()
    exit_code = tree.exit_code(process.returncode)
    if verdict == "exited" and exit_code is None:
        last = stderr.text().strip().rsplit("\n", 1)[-1] or f"exit code {process.returncode}"
        raise RuntimeFault(f"the sandbox could not be set up: {last}")
    return Ended(
        exit_code=exit_code if verdict == "exited" else None,
        timed_out=verdict == "deadline",
        over_memory=verdict == "memory",
        seconds=time.monotonic() - started,
        stdout=stdout.text(),
        stderr=stderr.text(),
    )


def _start(launch: Launch) -> tuple[subprocess.Popen[bytes], Tree]:
    status_read, status_write = os.pipe()
    argv = launch.argv(status_write if launch.confined else None)
    try:
        with _stdin(launch.stdin) as stdin:
            process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=launch.cwd,
                env=launch.environment,
                pass_fds=(status_write,) if launch.confined else (),
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        os.close(status_read)
        raise RuntimeFault(f"{argv[0]} could not be started: {getattr(error, 'strerror', error)}") from error
    finally:
        os.close(status_write)
    if launch.confined:
        return process, Namespace(status_read)
    os.close(status_read)
    return process, UnixSession(process.pid)


async def _watch(pidfd: int, launch: Launch, tree: Tree, started: float) -> Verdict:
    while (left := started + launch.deadline_s - time.monotonic()) > 0:
        if await readable(pidfd, min(MEMORY_CHECK_S, left)):
            return "exited"
        if resident_bytes(tree.processes()) > launch.memory_bytes:
            return "memory"
    return "deadline"


class Tail(asyncio.Protocol):
    """The last KEPT_BYTES of a pipe, read as they come."""

    def __init__(self) -> None:
        self._kept = b""
        self._transport: asyncio.ReadTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self, pipe: IO[bytes] | None) -> None:
        """Begins to read; ``ended`` is done when nobody can write to the pipe any more."""
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-KEPT_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


@contextlib.contextmanager
def _stdin(text: str) -> Iterator[int]:
    """A descriptor to read ``text`` from: a file in memory, so that no writer has to keep up with the program."""
    if not text:
        yield subprocess.DEVNULL
        return
    descriptor = os.memfd_create("stdin")
    try:
        os.write(descriptor, text.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
