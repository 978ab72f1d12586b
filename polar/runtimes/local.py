"""The local runtime: sandboxes on this machine, confined by bubblewrap.

A session's folder ``sessions/<name>`` in the run folder holds its work folder and home; nothing else of the run
folder can be seen from inside. ``unsafe`` runs programs unconfined, in a process group, with the same limits per
process: for machines without bubblewrap, and for agents that are trusted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from functools import partial
from pathlib import Path, PurePosixPath

from polar.runtimes import bubblewrap
from polar.runtimes.names import INSIDE, VARIABLE, wrong_path, wrong_variable
from polar.runtimes.process_tree import Launch, run_tree
from polar.runtimes.runtime import Ended, Program, RuntimeFault
from polar.runtimes.trees import kill_left_behind
from schemas.tasks import Limits, RuntimeSpec

CHECK_DEADLINE_S = 20.0

log = logging.getLogger(__name__)


class LocalSandbox:
    """See ``runtime.Sandbox``."""

    def __init__(self, folder: Path, spec: RuntimeSpec, *, hidden: list[Path], unsafe: bool) -> None:
        self.folder, self.work, self.home = folder, folder / "work", folder / "home"
        self._spec, self._hidden, self._unsafe = spec, hidden, unsafe
        self._uid = bubblewrap.session_uid(folder.name)

    def make(self) -> None:
        """Creates the folders. Raises RuntimeFault when the disk refuses, or for a name that cannot be used."""
        if wrong := [name for name in self._spec.environment if wrong_variable(name)]:
            raise RuntimeFault(f"runtime.environment: {wrong[0]!r} must be {VARIABLE}")
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            self.work.mkdir()
            self.home.mkdir()
            account = f"agent:x:{self._uid}:{self._uid}:agent:{bubblewrap.HOME}:/bin/bash\n"
            (self.folder / "passwd").write_text(f"root:x:0:0:root:/root:/bin/bash\n{account}")
            (self.folder / "group").write_text(f"root:x:0:\nagent:x:{self._uid}:\n")
            _write(self.work, self._spec.files)
            self._give_away(self.folder / "work", self.folder / "home")
        except (OSError, ValueError) as error:
            raise RuntimeFault(f"{self.folder}: {getattr(error, 'strerror', error)}") from error

    async def run(self, program: Program, deadline_s: float) -> Ended:
        if program.home:
            self._write_home(program.home)
        places = self._places(program)
        environment = {
            "PATH": bubblewrap.PATH,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "USER": "agent",
            "LOGNAME": "agent",
            "HOME": bubblewrap.HOME,
            **self._spec.environment,
            **program.environment,
        }
        launch = Launch(
            argv=partial(self._argv, program),
            confined=not self._unsafe,
            environment={name: _placed(value, places) for name, value in environment.items()},
            cwd=self.work,
            stdin=program.stdin,
            deadline_s=deadline_s,
            memory_bytes=self._spec.limits.memory_mb * bubblewrap.MIB,
        )
        return await run_tree(launch)

    async def close(self) -> None:
        await asyncio.to_thread(remove, self.folder)

    def _argv(self, program: Program, status: int | None) -> list[str]:
        if status is None:
            places = self._places(program)
            dying = ["setpriv", "--pdeathsig", "KILL"]
            return [*dying, *bubblewrap.limited(self._spec.limits), *(_placed(word, places) for word in program.argv)]
        box = bubblewrap.Confinement(
            work=self.work,
            home=self.home,
            passwd=self.folder / "passwd",
            group=self.folder / "group",
            uid=self._uid,
            limits=self._spec.limits,
            hidden=self._hidden,
        )
        home = None if program.fresh_home else self.home
        return [*bubblewrap.confined(box, program.mounts, home, status), *program.argv]

    def _places(self, program: Program) -> dict[str, str]:
        """Unconfined, nothing is mounted: where the sandbox's paths are to be found instead."""
        if not self._unsafe:
            return {}
        mounts = {mount.target: str(mount.source) for mount in program.mounts}
        return {bubblewrap.HOME: str(self.home), **mounts}

    def _write_home(self, files: dict[str, str]) -> None:
        try:
            _write(self.home, files)
            self._give_away(self.home)
        except (OSError, ValueError) as error:
            raise RuntimeFault(f"{self.home}: {getattr(error, 'strerror', error)}") from error

    def _give_away(self, *folders: Path) -> None:
        if os.geteuid() != 0 or self._unsafe:
            return
        for folder in folders:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self._uid, self._uid, follow_symlinks=False)


class LocalRuntime:
    """See ``runtime.Runtime``. ``folder`` holds the sandboxes; ``hidden`` is what no sandbox may see."""

    def __init__(self, folder: Path, *, hidden: list[Path], unsafe: bool = False) -> None:
        self._folder, self._unsafe = folder, unsafe
        self._hidden = [path.resolve() for path in hidden]

    async def check(self) -> None:
        if not self._unsafe:
            bubblewrap.required()
        sandbox = await self.create(f"check-{os.getpid()}", RuntimeSpec(limits=Limits(memory_mb=256)))
        try:
            ended = await sandbox.run(Program(argv=["true"]), CHECK_DEADLINE_S)
        finally:
            await sandbox.close()
        if ended.exit_code != 0:
            detail = ended.reason or ended.stderr.strip().rsplit("\n", 1)[-1]
            raise RuntimeFault(f"the local runtime cannot run a program: {detail}")

    async def create(self, name: str, spec: RuntimeSpec) -> LocalSandbox:
        sandbox = LocalSandbox(self._folder / name, spec, hidden=self._hidden, unsafe=self._unsafe)
        sandbox.make()
        return sandbox

    def clear(self) -> None:
        kill_left_behind(self._folder)
        remove(self._folder)


def remove(folder: Path) -> None:
    """Removes a folder, also where an agent took away permissions, or nested deeper than a path can say.

    Symbolic links are not followed. What the disk still keeps is logged.
    """
    for step in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not os.path.lexists(folder):
            return
        try:
            # What they say has no bound: a line for each file.
            subprocess.run([*step, "--", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        except OSError as error:
            log.error("%s stays: %s cannot be run: %s", folder, step[0], error.strerror)
            return
    if os.path.lexists(folder):
        log.error("%s stays: rm -rf fails; remove it by hand", folder)


def _placed(text: str, places: dict[str, str]) -> str:
    """``text`` with each path of the sandbox replaced by where it lies on this machine."""
    for inside, outside in places.items():
        text = text.replace(inside, outside)
    return text


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes ``files`` below ``folder``, through no symbolic link: a program may have made some. None runs now."""
    for name, text in files.items():
        if wrong_path(name):
            raise RuntimeFault(f"runtime.files: {name!r} must be {INSIDE}")
        relative = PurePosixPath(name)
        path = folder
        for part in relative.parts[:-1]:
            path /= part
            if path.is_symlink():
                raise RuntimeFault(f"{path} is a symbolic link: nothing is written through it")
            path.mkdir(exist_ok=True)
        path /= relative.parts[-1]
        path.unlink(missing_ok=True)
        path.write_text(text)
