"""``polar status``, ``sessions``, ``show`` and ``weights``: what the admin API knows, as tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from polar.admin_api import AdminApi
from polar.cli.mistake import UserMistake
from polar.cli.story import said, short
from polar.cli.tables import age, dash, show_table, table
from polar.store.rows import CallRow, SessionRow, SessionStory, Status, WeightRow
from schemas.sessions import Sampling

Limit = Annotated[int, typer.Option(min=1, max=5000, help="How many at most, the newest first.")]


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second until Ctrl-C.")] = False,
) -> None:
    """Slots of the nodes, READY, sessions by state, reward, loss, weight versions."""
    api: AdminApi = context.obj
    console = Console()
    if not watch:
        console.print(status_panel(api.get("/admin/status", Status)))
        return
    with Live(status_panel(api.get("/admin/status", Status)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(status_panel(api.get("/admin/status", Status)), refresh=True)


def status_panel(status: Status) -> RenderableType:
    """The whole status as one renderable."""
    nodes = [
        [
            node.node_id + (" (lost)" if node.lost else ""),
            f"{node.preparing}/{node.init_slots}",
            f"{node.ready}/{node.ready_slots}",
            f"{node.running}/{node.run_slots}",
            f"{node.postrun}/{node.postrun_slots}",
            age(node.heartbeat_at),
        ]
        for node in status.nodes
    ]
    return Group(
        table(["node", "INIT", "READY", "RUNNING", "POSTRUN", "heartbeat"], nodes),
        *(Text(f"{name:<12}{value}") for name, value in status_lines(status)),
    )


def status_lines(status: Status) -> list[tuple[str, str]]:
    """Name and value of what a status says beyond its nodes."""
    metrics = status.step.metrics if status.step else {}
    loaded = ", ".join(f"v{version} ({engine})" for engine, version in status.versions_loaded.items())
    return [
        ("sessions", counts(status.sessions)),
        ("unusable", counts(status.unusable)),
        ("groups", counts(status.groups)),
        ("excluded", counts(status.exclusions)),
        ("splits", counts(status.splits)),
        ("batch", str(status.last_batch)),
        ("reward", f"{dash(status.reward_mean, '.3f')} (last 64 train sessions)"),
        ("loss", dash(metrics.get("loss"), ".4f")),
        ("weights", f"published {_version(status.version_published)}, loaded {loaded or '–'}"),
        (
            "mismatch",
            f"engine ↔ trainer {dash(status.probe_mean_difference, '.1e')}, captured ↔ recomputed "
            f"{dash(metrics.get('logprob_mismatch'), '.1e')} (mean, nats)",
        ),
    ]


def _version(version: int | None) -> str:
    return "–" if version is None else f"v{version}"


def counts(by_name: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in by_name.items()) or "–"


def sessions(
    context: typer.Context,
    limit: Limit = 30,
    state: Annotated[str | None, typer.Option(help="Only those in this state: running, usable, unusable …")] = None,
    task: Annotated[str | None, typer.Option(help="Only those of this task id.")] = None,
) -> None:
    """List sessions, the newest first."""
    api: AdminApi = context.obj
    rows = api.get("/admin/sessions", list[SessionRow], limit=limit, status=state, task_id=task)
    show_table(
        ["session", "age", "attempt", "state", "purpose", "agent", "calls", "tokens", "traces", "reward", "reason"],
        [
            [
                row.session_id,
                age(row.opened_at or row.at),
                row.attempt,
                row.state,
                row.purpose,
                row.harness,
                row.calls,
                row.sampled_tokens,
                row.traces,
                dash(row.reward, "g"),
                row.reason or row.outcome_reason or "",
            ]
            for row in rows
        ],
        empty="no sessions yet: they start when tasks are submitted",
    )


def show(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="A session id, or its start or end.")],
) -> None:
    """One session's story: what happened, each turn with its tokens, and the traces."""
    api: AdminApi = context.obj
    story = api.get(f"/admin/sessions/{resolve(api, session)}", SessionStory)
    console = Console(soft_wrap=True, highlight=False)
    for attempt in story.attempts:
        console.print(Text(_headline(attempt), style="bold"))
    for event in story.events:
        console.print(Text(f"{event.at:%H:%M:%S}  #{event.attempt}  {event.type:<17}  {event.text}"))
    numbers = {call.call_id: call.number for call in story.calls}
    for call in story.calls:
        console.print(Text(f"\n{turn_head(call)}", style="bold"))
        console.print(Text(f"  {turn_facts(call, numbers)}", style="dim"))
        for message in call.messages:
            console.print(Text(f"  {message.get('role', '?'):<10}{said(message, width=400)}"))
        if call.message is not None:
            console.print(Text(f"  → {said(call.message, width=400)}", style="green"))
    traces = [
        [
            short(trace.trace_id),
            trace.branch,
            trace.prompt_tokens,
            trace.response_tokens,
            trace.trained_tokens,
            ",".join(f"v{version}" for version in trace.versions),
            f"{trace.reward:g}",
            "; ".join(trace.notes),
        ]
        for trace in story.traces
    ]
    columns = ["trace", "branch", "prompt", "response", "trained", "versions", "reward", "notes"]
    show_table(columns, traces, empty="no traces", title="traces (tokens)")


def resolve(api: AdminApi, session: str) -> str:
    """The one session id that is, starts or ends with ``session``. Raises UserMistake for none or many."""
    if len(session) >= 36:
        return session
    rows = api.get("/admin/sessions", list[SessionRow], limit=5000)
    found = sorted(
        {row.session_id for row in rows if row.session_id.startswith(session) or row.session_id.endswith(session)}
    )
    if len(found) != 1:
        what = "no session has" if not found else f"{len(found)} sessions have"
        raise UserMistake(f"{what} an id like {session!r}: 'polar sessions' lists them")
    return found[0]


def _headline(row: SessionRow) -> str:
    parts = [f"session {row.session_id}  attempt {row.attempt}{' (void)' if row.void else ''}: {row.state}"]
    if row.reward is not None:
        parts.append(f"reward {row.reward:g}")
    parts.append(f"{row.harness} on {row.node_id}, {row.purpose} task {row.task_id}, sample {row.sample_index}")
    return ", ".join(parts)


def turn_head(call: CallRow) -> str:
    """Its number, state and rule, and how many tokens it has."""
    versions = ",".join(f"v{span['version']}" for span in call.versions)
    known = f" after {call.kept_ids} known" if call.kept_ids else ""
    prompt = "prompt not told" if call.new_prompt_tokens is None else f"{call.new_prompt_tokens} prompt tokens{known}"
    sampled = f", {call.response_tokens} sampled by {versions}" if call.response_tokens is not None else ""
    failure = f", {call.failure}: {call.failure_detail}" if call.failure else ""
    auxiliary = f", auxiliary: {call.auxiliary}" if call.auxiliary else ""
    return f"turn {call.number} #{call.attempt} ({call.state}{auxiliary}): {prompt}{sampled}{failure}"


def turn_facts(call: CallRow, numbers: Mapping[str, int]) -> str:
    """Whose turn it goes on from, its thread, where its prompt comes from and the sampling in effect.

    ``numbers`` holds those of the session's calls.
    """
    facts = []
    if call.parent_call_id is not None:
        number = numbers.get(call.parent_call_id)
        facts.append(f"after call {short(call.parent_call_id)}" if number is None else f"after turn {number}")
    if call.thread_id is not None:
        facts.append(f"thread {call.thread_id}")
    if call.history is not None:
        note = f" ({call.history_note})" if call.history_note else ""
        facts.append(f"{call.history} history{note}")
    return ", ".join([*facts, sampling_words(msgspec.convert(call.sampling, Sampling))])


def sampling_words(sampling: Sampling) -> str:
    """The temperature, and what else is not neutral.

    >>> sampling_words(Sampling(temperature=0.7, top_k=20, altered=["logit_bias"]))
    'temperature 0.7, top_k 20, also logit_bias'
    """
    neutral = Sampling()
    names = [name for name in Sampling.__struct_fields__ if name not in ("temperature", "altered")]
    values = {name: getattr(sampling, name) for name in names}
    words = [f"{name} {value}" for name, value in values.items() if value != getattr(neutral, name)]
    also = [f"also {' '.join(sampling.altered)}"] if sampling.altered else []
    return ", ".join([f"temperature {sampling.temperature:g}", *words, *also])


def weights(context: typer.Context, limit: Limit = 30) -> None:
    """Weight versions, their step's metrics, and where they were loaded."""
    api: AdminApi = context.obj
    rows = api.get("/admin/weights", list[WeightRow], limit=limit)
    show_table(
        ["version", "age", "loaded by", "engine ↔ trainer", "metrics", "path"],
        [
            [
                f"v{row.version}",
                age(row.at),
                ", ".join(load.engine_id for load in row.loads) or "–",
                ", ".join(f"{load.probe_mean_difference:.1e}" for load in row.loads),
                ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()),
                row.path,
            ]
            for row in rows
        ],
        empty="no weights yet: the trainer publishes version 0 when it starts",
    )
