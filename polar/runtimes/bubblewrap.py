"""The command line that confines a program: what it sees, who it is, and what it may use.

It sees the system read-only, its work folder at /work, its home at /home/agent, an empty /tmp, and the mounts it was
given. It has its own pid, ipc and uts namespaces. The network is the host's, since the gateway listens there.
Started by root, bubblewrap itself stays root to make the mounts and the program gets a user id of its own; otherwise
a user namespace stands in for root. In both, the limit on processes counts this sandbox alone.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import msgspec

from polar.runtimes.runtime import Mount, RuntimeFault
from schemas.tasks import Limits

WORK = "/work"
HOME = "/home/agent"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")
RESOLVER = "/run/systemd/resolve"
"""Where /etc/resolv.conf points to on systemd machines."""
MIB = 1024 * 1024
FIRST_UID, UIDS = 20_000, 40_000
"""Above a system's own users and below those that systemd gives out."""


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. ``passwd`` and ``group`` are files that name ``uid``; ``hidden`` host folders are never seen."""

    work: Path
    home: Path
    passwd: Path
    group: Path
    uid: int
    limits: Limits
    hidden: list[Path]


def required() -> dict[str, str]:
    """The programs that confine, by name. Raises RuntimeFault naming those that are missing."""
    found = {name: shutil.which(name) for name in ("bwrap", "prlimit", "setpriv", "bash")}
    if missing := [name for name, path in found.items() if path is None]:
        packages = "bubblewrap and util-linux"
        raise RuntimeFault(
            f"the local runtime needs {', '.join(missing)}: install {packages}, "
            "or set POLAR_UNSAFE_LOCAL=true to run agents unconfined"
        )
    return {name: path for name, path in found.items() if path is not None}


def session_uid(name: str) -> int:
    """Root gives each sandbox a user id of its own; anyone else can only be themselves."""
    return FIRST_UID + zlib.crc32(name.encode()) % UIDS if os.geteuid() == 0 else os.geteuid()


def limited(limits: Limits) -> list[str]:
    """Per process: private writable memory (RLIMIT_AS would stop V8, which reserves far more than it uses),
    size of a file, no core dumps; and the number of processes and threads together."""
    return [
        "prlimit",
        f"--data={limits.memory_mb * MIB}",
        f"--fsize={limits.file_mb * MIB}",
        f"--nproc={limits.processes}",
        "--core=0",
        "--",
    ]


def confined(box: Confinement, mounts: list[Mount], home: Path | None, status: int) -> list[str]:
    """What to put before a program's argv. ``home`` None gives an empty home in memory."""
    root = os.geteuid() == 0
    tmpfs = ["--perms", "1777", "--size", str(box.limits.file_mb * MIB), "--tmpfs"]
    line = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    line += [
        "--json-status-fd",
        str(status),
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--hostname",
        "sandbox",
    ]
    line += ["--unshare-cgroup-try"]
    line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    line += ["--proc", "/proc", "--dev", "/dev", *tmpfs, "/dev/shm", *tmpfs, "/tmp"]
    for folder in (*SYSTEM, RESOLVER):
        line += ["--ro-bind-try", folder, folder]
    for hidden in box.hidden:
        if any(hidden.is_relative_to(Path(system).resolve()) for system in SYSTEM):
            line += ["--tmpfs", str(hidden)]
    line += ["--ro-bind", str(box.passwd), "/etc/passwd", "--ro-bind", str(box.group), "/etc/group"]
    line += ["--perms", "0755", "--dir", "/home", "--perms", "0755", "--dir", "/polar"]
    line += ["--bind", str(box.work), WORK]
    line += ["--bind", str(home), HOME] if home is not None else [*tmpfs, HOME]
    for mount in mounts:
        line += ["--ro-bind", str(mount.source), mount.target]
    line += ["--chdir", WORK, "--"]
    if root:
        line += ["setpriv", "--reuid", str(box.uid), "--regid", str(box.uid), "--clear-groups", "--inh-caps=-all"]
    return line + limited(box.limits)
