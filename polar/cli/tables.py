"""Tables and short forms for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    """Plain cells: square brackets in them are text."""
    result = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str, title: str | None = None) -> None:
    """Prints a table, or the line ``empty`` when there are no rows. Not cut when the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table(columns, rows, title) if rows else Text(empty))


def dash(value: float | None, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def age(at: datetime | None) -> str:
    """How long ago, in the largest fitting unit."""
    if at is None:
        return "–"
    seconds = (datetime.now(UTC) - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
