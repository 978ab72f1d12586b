"""``report.html``: the curves of a run in one file that needs no other."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polar.demo.result import DemoResult, Evaluation
from polar.store.rows import BatchRow, SessionRow, WeightRow

matplotlib.use("svg")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #1b1f24 }
h1 { font-size: 1.5em } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
figure { margin: 0 } figcaption { color: #57606a; font-size: .9em } svg { width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2em .9em .2em 0; text-align: left }
.wide { grid-column: 1 / -1 }
"""


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """What the admin API knew at the end. Weights and batches ascending."""

    weights: list[WeightRow]
    batches: list[BatchRow]
    sessions: list[SessionRow]


def write_report(path: Path, result: DemoResult, records: RunRecords) -> Path:
    """Writes the page whole or not at all, and returns ``path``."""
    charts = [
        _figure("Held-out pass@1 with 95 % Wilson intervals", lambda axes: _pass_bars(axes, result)),
        _figure("Mean reward of the sessions in each batch", lambda axes: _rewards(axes, records)),
        _figure("Loss of each step", lambda axes: _metric(axes, records, ["loss"], "loss")),
        _figure(
            "Share of clipped tokens; KL to the base model where it was measured",
            lambda axes: _metric(axes, records, ["clip_fraction", "kl"], "share, nats"),
        ),
        _figure(
            "Staleness: steps between the version that sampled a batch's oldest token and the one that trained on it",
            lambda axes: _staleness(axes, records),
        ),
        _figure("Log-prob mismatch, mean |difference|", lambda axes: _mismatch(axes, records)),
        _figure(
            "Sessions over time, and when weights were published", lambda axes: _timeline(axes, records), wide=True
        ),
    ]
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Polar demo</title><style>{STYLE}</style>'
        f"<h1>Polar demo: held-out pass@1 {_share(result.before)} → {_share(result.after)}</h1>"
        f'{_facts(result)}<div class="charts">{"".join(charts)}</div></html>'
    )
    fresh = path.with_suffix(".new")
    fresh.write_text(page, encoding="utf-8")
    return fresh.replace(path)


def _share(evaluated: Evaluation) -> str:
    return f"{100 * evaluated.pass_at_1:.0f} %" if evaluated.sessions else "–"


def _facts(result: DemoResult) -> str:
    config = result.config
    excluded = ", ".join(f"{count} {reason}" for reason, count in result.groups_excluded.items()) or "none"
    restarts = ", ".join(f"{name} {count}" for name, count in result.restarts.items()) or "none"
    facts = {
        "weight version": f"{result.version} of {config.steps}",
        "held-out sessions": f"{result.before.sessions} before, {result.after.sessions} after",
        "not scored": f"{result.before.unscored} before, {result.after.unscored} after",
        "groups": f"{result.groups_trained} trained of {config.num_samples} sessions each; excluded: {excluded}",
        "engine ↔ trainer": _nats(result.mismatch_engine_trainer),
        "captured ↔ recomputed": _nats(result.mismatch_captured_recomputed),
        "learning rate, seed": f"{config.learning_rate:g}, {config.seed}",
        "seconds": f"{result.seconds:.0f}",
        "restarts": restarts,
    }
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts.items())
    return f"<table>{rows}</table>"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e} nats on average"


def _figure(caption: str, draw: Callable[[Axes], None], *, wide: bool = False) -> str:
    figure = Figure(figsize=(11.0, 3.2) if wide else (5.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    output = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": caption}):
        figure.savefig(output, format="svg")
    svg = output.getvalue()
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _pass_bars(axes: Axes, result: DemoResult) -> None:
    evaluations = [result.before, result.after]
    shares = [evaluated.pass_at_1 if evaluated.sessions else 0.0 for evaluated in evaluations]
    errors = [
        [share - evaluated.interval[0] for share, evaluated in zip(shares, evaluations, strict=True)],
        [evaluated.interval[1] - share for share, evaluated in zip(shares, evaluations, strict=True)],
    ]
    names = [f"{name} (v{evaluated.version})" for name, evaluated in zip(("before", "after"), evaluations, strict=True)]
    axes.bar(names, shares, yerr=errors, capsize=8, color=["#9aa4b2", "#2f81f7"])
    axes.set_ylim(0, 1)
    axes.set_ylabel("pass@1")


def _rewards(axes: Axes, records: RunRecords) -> None:
    points = [(row.batch, row.reward_mean) for row in records.batches if row.reward_mean is not None]
    axes.plot([batch for batch, _ in points], [reward for _, reward in points], marker="o")
    _label(axes, "batch", "reward")


def _metric(axes: Axes, records: RunRecords, names: Sequence[str], label: str) -> None:
    for name in names:
        points = _metric_points(records, name)
        if points:
            axes.plot([version for version, _ in points], [value for _, value in points], marker="o", label=name)
    if axes.lines:
        axes.legend(frameon=False)
    _label(axes, "weight version", label)


def _metric_points(records: RunRecords, name: str) -> list[tuple[int, float]]:
    return [(row.version, row.metrics[name]) for row in records.weights if name in row.metrics]


def _staleness(axes: Axes, records: RunRecords) -> None:
    axes.bar([row.batch for row in records.batches], [row.batch - 1 - row.oldest_version for row in records.batches])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _label(axes, "batch", "steps")


def _mismatch(axes: Axes, records: RunRecords) -> None:
    recomputed = _metric_points(records, "logprob_mismatch")
    probed = [(row.version, row.loads[-1].probe_mean_difference) for row in records.weights if row.loads]
    for points, label in ((recomputed, "captured ↔ recomputed"), (probed, "engine ↔ trainer (probe)")):
        if points:
            axes.plot([x for x, _ in points], [max(y, 1e-9) for _, y in points], marker="o", label=label)
    axes.axhline(1e-3, color="#cf222e", linewidth=1, linestyle="--")
    axes.set_yscale("log")
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    _label(axes, "weight version", "nats")


def _timeline(axes: Axes, records: RunRecords) -> None:
    """Each session a bar, on the lowest lane that is free when it opens."""
    spans = sorted(
        (row.opened_at, row.closed_at, row.purpose) for row in records.sessions if row.opened_at and row.closed_at
    )
    if not spans:
        return
    start = spans[0][0]
    free_at: list[datetime] = []
    for opened, closed, purpose in spans:
        lane = next((lane for lane, free in enumerate(free_at) if free <= opened), len(free_at))
        free_at[lane : lane + 1] = [closed]
        left, width = (opened - start).total_seconds(), (closed - opened).total_seconds()
        axes.barh(lane, max(width, 0.05), left=left, height=0.8, color="#2f81f7" if purpose == "train" else "#d29922")
    for row in records.weights:
        axes.axvline((row.at - start).total_seconds(), color="#57606a", linewidth=0.6, linestyle=":")
    axes.set_yticks([])
    _label(axes, "seconds (blue: train, amber: held-out, dotted: weights published)", "sessions")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
