"""Runs one command with everything that it starts, and ends all of it.

Under bubblewrap the tree is a pid namespace: killing its first process makes the kernel kill every other, also those
that daemonised, and that first process only turns into a zombie after them. Without bubblewrap the tree is a unix
session, and a process that calls setsid escapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from polar.runtimes.runtime import Ended, RuntimeFault
from polar.runtimes.trees import Namespace, Tree, UnixSession, resident_bytes

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
    process, tree = await _start(launch)
    stdout, stderr = Tail(process.stdout), Tail(process.stderr)
    try:
        await tree.opened()
        verdict = await _watch(process, launch, tree, started)
    finally:
        await _end(process, tree)
        await asyncio.wait({stdout.reading, stderr.reading}, timeout=DRAIN_S)
        stdout.reading.cancel()
        stderr.reading.cancel()
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


async def _start(launch: Launch) -> tuple[asyncio.subprocess.Process, Tree]:
    status_read, status_write = os.pipe()
    argv = launch.argv(status_write if launch.confined else None)
    try:
        with _stdin(launch.stdin) as stdin:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=launch.cwd,
                env=launch.environment,
                pass_fds=(status_write,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(status_read)
        raise RuntimeFault(f"{argv[0]} could not be started: {error.strerror}") from error
    finally:
        os.close(status_write)
    if launch.confined:
        return process, Namespace(status_read)
    os.close(status_read)
    return process, UnixSession(process.pid)


async def _watch(process: asyncio.subprocess.Process, launch: Launch, tree: Tree, started: float) -> Verdict:
    ended = asyncio.ensure_future(process.wait())
    try:
        while (left := started + launch.deadline_s - time.monotonic()) > 0:
            await asyncio.wait({ended}, timeout=min(MEMORY_CHECK_S, left))
            if ended.done():
                return "exited"
            if resident_bytes(tree.processes()) > launch.memory_bytes:
                return "memory"
        return "deadline"
    finally:
        ended.cancel()


async def _end(process: asyncio.subprocess.Process, tree: Tree) -> None:
    """Kills what is left and waits until it is gone, also while the caller is being cancelled."""
    tree.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await tree.gone()
    await process.wait()


class Tail:
    """The last KEPT_BYTES of a stream, read as they come."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self._kept = b""
        self.reading = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            self._kept = (self._kept + chunk)[-KEPT_BYTES:]

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


@contextlib.contextmanager
def _stdin(text: str) -> Iterator[int]:
    """A descriptor to read ``text`` from: a file in memory, so that no writer has to keep up with the program."""
    if not text:
        yield asyncio.subprocess.DEVNULL
        return
    descriptor = os.memfd_create("stdin")
    try:
        os.write(descriptor, text.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
