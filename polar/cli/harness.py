"""``polar harness``: which agent programs there are, installing them, and whether they reach a model."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polar.cli.mistake import UserMistake
from polar.cli.run import UnsafeLocal
from polar.cli.tables import show_table
from polar.harnesses import HARNESSES, HarnessError, Preset
from polar.harnesses.installing import install as install_package
from polar.harnesses.packages import NODE, NpmPackage, Package, executable, installed, version
from polar.harnesses.probe import probe, started
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import RuntimeFault
from polar.settings import from_environment
from schemas.tasks import RuntimeSpec

DEADLINE_S = 120.0

app = typer.Typer(help="List, install and check agent programs.", no_args_is_help=True)


@app.command("list")
def list_harnesses() -> None:
    """List the presets: which program each runs, and whether it is installed."""
    rows = []
    for name, preset in sorted(HARNESSES.items()):
        package = preset.package
        about = (package.package, package.version, _state(name, package)) if package else (preset.notes, "–", "–")
        rows.append([name, *about, ", ".join(preset.dialects)])
    show_table(["name", "program", "version", "installed", "dialects"], rows, empty="no presets")


@app.command()
def install(
    names: Annotated[list[str] | None, typer.Argument(help="As 'polar harness list' shows them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Install every preset's program.")] = False,
) -> None:
    """Install the pinned version of agent programs, where it is not there yet."""
    if every == bool(names):
        raise UserMistake("which ones? Give names as 'polar harness list' shows them, or --all")
    chosen = {name: _preset(name).package for name in (sorted(HARNESSES) if every else names or [])}
    packages = {name: package for name, package in chosen.items() if package is not None}
    if any(isinstance(package, NpmPackage) and package.node for package in packages.values()):
        packages = {"node": NODE, **packages}
    for name in set(chosen) - set(packages) if not every else ():
        typer.echo(f"{name}: nothing to install")
    for name, package in packages.items():
        _install(name, package)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="As 'polar harness list' shows it.")], unsafe_local: UnsafeLocal = False
) -> None:
    """Check one agent program: installed as pinned, starts in the sandbox, and asks the model at its session's path."""
    preset = _preset(name)
    if preset.package is None:
        typer.echo(f"{name}: {preset.notes}; nothing to check before a task says which")
        return
    try:
        typer.echo(
            f"installed     {preset.package.package} {preset.package.version}: {executable(name, preset.package)}"
        )
        asyncio.run(_check(name, preset, unsafe_local or from_environment().unsafe_local))
    except (HarnessError, RuntimeFault) as error:
        raise UserMistake(str(error)) from None


async def _check(name: str, preset: Preset, unsafe: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="polar-check-") as folder:
        sandbox = await LocalRuntime(Path(folder), hidden=[], unsafe=unsafe).create(name, RuntimeSpec())
        try:
            before = time.monotonic()
            said = await started(name, preset, sandbox, DEADLINE_S)
            typer.echo(f"starts        {said} ({time.monotonic() - before:.1f} s)")
            *others, call = await probe(name, preset, sandbox, DEADLINE_S)
        finally:
            await sandbox.close()
    for other in others:
        typer.echo(f"also asks     {other.method} {other.path}")
    typer.echo(f"asks a model  {call.method} {call.path}: {call.dialect}, after {call.seconds:.1f} s")


def _preset(name: str) -> Preset:
    if name not in HARNESSES:
        raise UserMistake(f"harness {name!r} is unknown: use one of {', '.join(sorted(HARNESSES))}")
    return HARNESSES[name]


def _state(name: str, package: Package) -> str:
    if installed(name, package):
        return "yes"
    found = version(name, package)
    return "no" if found is None else f"not as pinned: {found}"


def _install(name: str, package: Package) -> None:
    title = f"{name}: {package.package} {package.version}"
    if installed(name, package):
        typer.echo(f"{title} is there")
        return
    before = time.monotonic()
    try:
        with Console(stderr=True).status(f"installing {title}"):
            install_package(name, package)
    except HarnessError as error:
        raise UserMistake(str(error)) from None
    typer.echo(f"{title} installed in {time.monotonic() - before:.0f} s")
