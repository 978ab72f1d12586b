"""``polar up`` and ``polar demo``: the services as processes of this one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from polar.demo.config import DemoConfig
from polar.stack import plan, point_latest

RunDir = Annotated[Path | None, typer.Option(help="Where data, logs, pids and checkpoints go.", show_default=False)]
UnsafeLocal = Annotated[bool, typer.Option("--unsafe-local", help="Run agents unconfined, without bubblewrap.")]
_DEFAULTS = DemoConfig()


def _environment(unsafe_local: bool) -> None:
    """What an option says goes to every service as its variable."""
    if unsafe_local:
        os.environ["POLAR_UNSAFE_LOCAL"] = "true"


@contextmanager
def stopping_by_signal() -> Iterator[None]:
    """SIGTERM and SIGINT raise KeyboardInterrupt once; while everything stops they are ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def up(run_dir: RunDir = None, unsafe_local: UnsafeLocal = False) -> None:
    """Start every service and keep it up until Ctrl-C. Data stays in the run folder (runs/default)."""
    _environment(unsafe_local)
    with stopping_by_signal():
        stack = plan(os.environ, run_dir=run_dir)
        folder = stack.settings.run_dir
        try:
            with stack.supervisor(os.environ) as supervisor:
                point_latest(folder)
                typer.echo(f"starting {', '.join(service.name for service in stack.services)}")
                supervisor.start(lambda name, seconds: typer.echo(f"  {name} is ready after {seconds:.1f} s"))
                typer.echo(f"all up: admin API {stack.settings.admin_url}, gateway {stack.settings.gateway_url}")
                typer.echo(f"logs in {folder / 'logs'}; Ctrl-C stops everything and keeps the data")
                restarts = supervisor.restarts
                while True:
                    supervisor.poll()
                    for name, count in supervisor.restarts.items():
                        if count != restarts[name]:
                            typer.echo(f"{name} ended and is started again (restart {count}): see its log")
                    restarts = supervisor.restarts
                    time.sleep(0.25)
        except KeyboardInterrupt:
            typer.echo(f"\nstopped; the data stays in {folder}")


def demo(
    seed: Annotated[int, typer.Option(help="Of the train tasks, sampling order and the trainer.")] = _DEFAULTS.seed,
    steps: Annotated[int, typer.Option(min=1, help="Weight versions to train.")] = _DEFAULTS.steps,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="0 is a control.")] = _DEFAULTS.learning_rate,
    run_dir: RunDir = None,
    unsafe_local: UnsafeLocal = False,
) -> int:
    """Train the shipped policy on a real agent, and measure held-out tasks before and after. About ten minutes."""
    from polar.demo.run import run_demo

    _environment(unsafe_local)
    config = DemoConfig(seed=seed, steps=steps, learning_rate=learning_rate)
    folder = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    with stopping_by_signal():
        try:
            run_demo(config, folder)
        except KeyboardInterrupt:
            typer.echo(f"\nstopped; the data stays in {folder}")
            return 130
    return 0
