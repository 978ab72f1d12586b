"""Installs agent programs with npm and pip, in a draft folder that takes the old one's place when it is whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polar
from polar.harnesses.packages import HarnessError, NpmPackage, Package, PipPackage, executable, folder

REQUIREMENTS = Path(polar.__file__).parent.parent / "requirements"
NPM = ("npm", "install", "--no-fund", "--no-audit", "--loglevel=error", "--save-exact")
PIP = ("-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--no-input")


def install(name: str, package: Package) -> None:
    """Installs the pinned version, whatever is there. Raises HarnessError with the installer's own last words."""
    place = folder(name)
    draft = place.with_name(f".{name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        if isinstance(package, NpmPackage):
            _run(name, [*NPM, "--prefix", str(draft), f"{package.package}@{package.version}"])
        else:
            _install_venv(name, package, draft)
        _remove(place)
        draft.rename(place)
    except OSError as error:
        raise HarnessError(f"harness {name}: {error.filename or place}: {error.strerror}") from None
    finally:
        _remove(draft)
    executable(name, package)


def _install_venv(name: str, package: PipPackage, place: Path) -> None:
    pinned = REQUIREMENTS / package.requirements
    if not pinned.is_file():
        raise HarnessError(f"harness {name}: {pinned} is missing: install it from a checkout of Polar")
    _run(name, [sys.executable, "-m", "venv", str(place)])
    _run(name, [str(place / "bin" / "python"), *PIP, "-r", str(pinned)])


def _run(name: str, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise HarnessError(f"harness {name}: {command[0]} is not in PATH: install Node 20 or newer, with npm")
    ended = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if ended.returncode != 0:
        said = " ".join((ended.stderr.strip() or ended.stdout.strip())[-600:].split())
        raise HarnessError(f"harness {name}: {' '.join(command[:3])} … failed: {said}")


def _remove(place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
