"""The interface of a runtime: it makes sandboxes, and a sandbox runs programs one after another.

A sandbox keeps two folders from its creation to its closing: the work folder and the home. Everything else that a
program writes or starts is gone when ``run`` returns, however it returns: no process of a program outlives its run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from schemas.tasks import RuntimeSpec

TAIL_BYTES = 4096
"""How much of a program's stdout, and of its stderr, is kept."""


class RuntimeFault(Exception):
    """The sandbox itself failed: no fault of the program in it. One line: what, where, what to do."""


class Mount(msgspec.Struct, frozen=True):
    """The host's file or folder ``source``, seen read-only in the sandbox at ``target`` (below /polar)."""

    source: Path
    target: str


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``home`` files (relative path → text) are written first; ``home_path`` in argv is not expanded."""

    argv: list[str]
    environment: dict[str, str] = {}
    stdin: str = ""
    home: dict[str, str] = {}
    fresh_home: bool = False
    """Run with an empty home of its own instead of the session's."""
    mounts: list[Mount] = []


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. ``exit_code`` is None when the sandbox ended it: deadline or memory limit."""

    exit_code: int | None
    timed_out: bool
    over_memory: bool
    seconds: float
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """Why the sandbox ended it; empty when it ended by itself."""
        if self.timed_out:
            return "the deadline was reached"
        return "the memory limit was reached" if self.over_memory else ""


class Sandbox(Protocol):
    """One session's place. ``work`` is the work folder as this process sees it."""

    work: Path

    async def run(self, program: Program, deadline_s: float) -> Ended:
        """Runs ``program`` in the work folder until it and all that it started is gone.

        A cancelled run has ended its processes when CancelledError comes out. Raises RuntimeFault.
        """
        ...

    async def close(self) -> None:
        """Removes both folders."""
        ...


class Runtime(Protocol):
    """Makes sandboxes."""

    async def check(self) -> None:
        """Raises RuntimeFault unless sandboxes can be made on this machine."""
        ...

    async def create(self, name: str, spec: RuntimeSpec) -> Sandbox:
        """A new sandbox with ``spec.files`` in its work folder. Raises RuntimeFault."""
        ...

    def clear(self) -> None:
        """Removes what sandboxes of a former process left behind."""
        ...
