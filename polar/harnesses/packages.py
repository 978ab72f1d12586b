"""Agent programs as packages: which version, where it is installed, and how a sandbox sees it.

Each preset has a folder of its own below the harness folder (POLAR_HARNESS_DIR, else .cache/harnesses): an npm prefix
or a Python venv. Node is installed there as well, since an agent program may need a newer one than the machine has.
A sandbox sees a preset's folder read-only at /polar/<preset>.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from polar.runtimes.bubblewrap import PATH
from polar.runtimes.runtime import Mount

DEFAULT_FOLDER = ".cache/harnesses"


class HarnessError(Exception):
    """A harness cannot start: wrong options, or it is not installed. One line: what, where, what to do."""


class NpmPackage(msgspec.Struct, frozen=True, kw_only=True):
    """``binary`` is a path below the npm prefix; a ``*`` in it stands for the machine's architecture."""

    package: str
    version: str
    binary: str
    node: bool
    """Whether ``binary`` is a script for Node."""


class PipPackage(msgspec.Struct, frozen=True, kw_only=True):
    """``module`` is what ``python -m`` runs; ``requirements`` a file in requirements/ that pins everything."""

    package: str
    version: str
    module: str
    requirements: str


Package = NpmPackage | PipPackage

NODE = NpmPackage(package="node", version="22.23.3", binary="node_modules/node/bin/node", node=False)
"""Starts the agent programs with a quarter less CPU time than Node 20 does."""


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """An installed program as a sandbox sees it: what its argv begins with, its PATH, and the mounts it needs."""

    argv: list[str]
    path: str
    mounts: list[Mount]


def folder(name: str) -> Path:
    """Where the preset ``name`` is installed, or would be."""
    return Path(os.environ.get("POLAR_HARNESS_DIR") or DEFAULT_FOLDER).resolve() / name


def version(name: str, package: Package) -> str | None:
    """The version that is installed, or None."""
    if isinstance(package, NpmPackage):
        manifest = folder(name) / "node_modules" / package.package / "package.json"
        return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else None
    distribution = package.package.replace("-", "_")
    found = list(folder(name).glob(f"lib/python3*/site-packages/{distribution}-*.dist-info"))
    return found[0].name.removeprefix(f"{distribution}-").removesuffix(".dist-info") if found else None


def installed(name: str, package: Package) -> bool:
    """Whether the pinned version is there, with all that it needs to run."""
    try:
        executable(name, package)
        if isinstance(package, NpmPackage) and package.node:
            executable("node", NODE)
    except HarnessError:
        return False
    return True


def executable(name: str, package: Package) -> Path:
    """The program's file on this machine, or its venv's interpreter. Raises HarnessError without the pinned version."""
    place, found = folder(name), version(name, package)
    remedy = f"run 'polar harness install {name}', or set POLAR_HARNESS_DIR" if package != NODE else "run make setup"
    if found is None:
        raise HarnessError(f"harness {name}: {package.package} is not installed in {place}: {remedy}")
    if found != package.version:
        raise HarnessError(f"harness {name}: {place} holds version {found}, not {package.version}: {remedy}")
    binary = package.binary if isinstance(package, NpmPackage) else "bin/python"
    files = sorted(place.glob(binary))
    if not files:
        raise HarnessError(f"harness {name}: {place / binary} is missing: {remedy}")
    return files[0]


def located(name: str, package: NpmPackage) -> Located:
    """How a sandbox runs it. Raises HarnessError without the pinned version, or without the Node that it needs."""
    file = executable(name, package)
    inside = f"/polar/{name}/{file.relative_to(folder(name))}"
    mounts = [Mount(folder(name).resolve(), f"/polar/{name}")]
    if not package.node:
        return Located(argv=[inside], path=PATH, mounts=mounts)
    node = located("node", NODE)
    path = f"{Path(node.argv[0]).parent}:{PATH}"
    return Located(argv=[*node.argv, inside], path=path, mounts=[*mounts, *node.mounts])
