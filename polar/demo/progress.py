"""What a person sees while the demo runs: one live panel on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from types import TracebackType

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from polar.cli.look import counts, status_panel
from polar.cli.tables import dash
from polar.store.rows import Status

PLAIN_EVERY_S = 10.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    restarts: dict[str, int]


class Progress:
    """Enter it around the run. ``began`` is a reading of ``time.monotonic``."""

    def __init__(self, console: Console, steps: int, began: float) -> None:
        self.began = began
        self._console = console
        self._steps = steps
        self._phase = ""
        self._told_at = 0.0
        self._told_version: int | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)
            self._live = None

    def phase(self, text: str) -> None:
        self._phase = text
        self.say(text)

    def ready(self, name: str, seconds: float) -> None:
        self.say(f"  {name} is ready after {seconds:.1f} s")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(Text(f"{self._elapsed():5.0f} s  {line}"), soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """The state as of now."""
        if self._live is not None:
            title = f"{self._elapsed():.0f} s · {self._phase}"
            self._live.update(Panel(self._body(snapshot), title=title, title_align="left"), refresh=True)
            return
        version = snapshot.status.version_published
        if version != self._told_version or time.monotonic() - self._told_at >= PLAIN_EVERY_S:
            self._told_version, self._told_at = version, time.monotonic()
            self.say(plain_line(snapshot.status, self._steps))

    def _body(self, snapshot: Snapshot) -> RenderableType:
        restarts = {name: count for name, count in snapshot.restarts.items() if count}
        steps = Text(f"{'steps':<12}{snapshot.status.version_published or 0} of {self._steps}")
        again = Text(f"{'restarts':<12}{counts(restarts)}", style="yellow" if restarts else "")
        return Group(status_panel(snapshot.status), steps, again)

    def _elapsed(self) -> float:
        return time.monotonic() - self.began


def plain_line(status: Status, steps: int) -> str:
    """The whole state in one line."""
    metrics = status.step.metrics if status.step else {}
    loaded = min(status.versions_loaded.values(), default=None)
    run_slots = sum(node.run_slots for node in status.nodes if not node.lost)
    ready_slots = sum(node.ready_slots for node in status.nodes if not node.lost)
    return "  ".join(
        [
            f"version {dash(status.version_published)}/{steps} (loaded {dash(loaded)})",
            f"READY {status.ready}/{ready_slots}",
            f"running {status.running}/{run_slots}",
            f"sessions: {counts(status.sessions)}",
            f"reward {dash(status.reward_mean, '.2f')}",
            f"loss {dash(metrics.get('loss'), '.4f')}",
            f"mismatch {dash(status.probe_mean_difference, '.0e')} / {dash(metrics.get('logprob_mismatch'), '.0e')}",
        ]
    )
