"""``polar topics``: how far each has come, and its records as lines."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from polar.admin_api import AdminApi
from polar.cli.story import line, read
from polar.cli.tables import show_table

app = typer.Typer(help="Look into the topics.", no_args_is_help=True)


@app.command("list")
def list_topics(context: typer.Context) -> None:
    """Partitions, offsets in the log (records and transaction markers), and how far each group is behind."""
    api: AdminApi = context.obj
    rows = api.get("/admin/topics", list[dict[str, Any]])
    show_table(["topic", "partitions", "offsets", "lag by group"], [_row(row) for row in rows], empty="no topics")


def _row(row: dict[str, Any]) -> list[Any]:
    offsets = sum(partition["end"] - partition["begin"] for partition in row["partitions"])
    lags = ", ".join(f"{group} {lag}" for group, lag in row["group_lags"].items())
    return [row["topic"], len(row["partitions"]), offsets, lags or "–"]


@app.command()
def tail(  # noqa: PLR0917  the command's options
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="For example polar.sessions.")],
    session: Annotated[str | None, typer.Option(help="Only this session: its id, or the start or end of it.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=5000, help="Begin with the last N.")] = 50,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on with new records.")] = True,
    raw: Annotated[bool, typer.Option("--json", help="The records as JSON Lines instead.")] = False,
) -> None:
    """The last records of a topic, one readable line each, then new ones until Ctrl-C."""
    api: AdminApi = context.obj
    for text in api.lines(f"/admin/topics/{topic}/tail", session=session, limit=limit, follow=follow):
        if raw:
            typer.echo(text.decode())
            continue
        try:
            typer.echo(line(read(text)))
        except msgspec.ValidationError as error:
            typer.echo(f"(not readable by this version: {error}) {text[:200].decode(errors='replace')}")
