"""``polar tasks``: submit, list, cancel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from polar.admin_api import AdminApi
from polar.cli.mistake import UserMistake
from polar.cli.tables import age, dash, show_table
from polar.store.rows import TaskRow

app = typer.Typer(help="Submit, list and cancel tasks.", no_args_is_help=True)


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="JSON with one task or a list, or JSON Lines; '-' reads stdin.")],
) -> None:
    """Submit tasks. A task_id that is known already is not submitted twice."""
    api: AdminApi = context.obj
    tasks = read_tasks(sys.stdin.buffer.read() if str(file) == "-" else _read(file), str(file))
    answer = api.post("/admin/tasks", tasks)
    for task_id in answer["task_ids"]:
        typer.echo(f"{task_id}{'' if task_id in answer['new'] else '  (known already)'}")


@app.command("list")
def list_tasks(
    context: typer.Context, limit: Annotated[int, typer.Option(min=1, max=5000, help="How many at most.")] = 30
) -> None:
    """List tasks, the newest first."""
    api: AdminApi = context.obj
    rows = api.get("/admin/tasks", list[TaskRow], limit=limit)
    show_table(
        ["task", "age", "purpose", "agent", "done", "usable", "reward", "instruction"],
        [
            [
                task.task_id,
                age(task.submitted_at),
                task.purpose + (" (cancelled)" if task.cancelled else ""),
                task.harness,
                f"{task.done}/{task.num_samples}",
                task.usable,
                dash(task.reward_mean, ".2f"),
                " ".join(task.instruction.split())[:60],
            ]
            for task in rows
        ],
        empty="no tasks yet: submit some with 'polar tasks submit FILE'",
    )


@app.command()
def cancel(
    context: typer.Context, task_id: Annotated[str, typer.Argument(help="As 'polar tasks list' shows it.")]
) -> None:
    """Cancel a task: sessions that wait never start, running ones are ended."""
    api: AdminApi = context.obj
    answer = api.delete(f"/admin/tasks/{task_id}")
    typer.echo(f"{task_id} {'cancelled' if answer['new'] else 'was cancelled already'}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserMistake(f"cannot read {file}: {error.strerror}") from None


def read_tasks(text: bytes, name: str) -> Any:
    """What a JSON text holds, or a list for JSON Lines. Raises UserMistake that names the file."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        first, reason = text.split(b"\n", 1)[0], error
    try:
        msgspec.json.decode(first)
        return msgspec.json.Decoder().decode_lines(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UserMistake(f"{name} is not JSON: {reason}") from None
