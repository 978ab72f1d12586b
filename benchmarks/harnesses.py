"""``python -m benchmarks.harnesses --json``: every agent program does a two-turn tool task, for real.

Each runs unmodified in its sandbox, from a task on Kafka to its traces, against a scripted engine that replies with the
program's own tool. It is done in exact mode and in chat mode. A row is green when the file was written and scored, the
program ended with 0, every call was captured with the ids that the engine sampled, and (exact) they make one trace.
The last line of stdout is one JSON object with ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "node")]

from harness_scripts import SCRIPTS  # noqa: E402
from harness_stage import Row, stage  # noqa: E402
from scripted_engine import Plan, Script, ScriptedEngine, by_turn  # noqa: E402

from schemas.tasks import HarnessSpec  # noqa: E402

MODES = ("exact", "chat")
CONTEXT = 200_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harnesses", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    parser.add_argument("--only", action="append", choices=sorted(SCRIPTS), help="this program; may be given again")
    parser.add_argument("--mode", action="append", choices=MODES, help="this mode; may be given again")
    options = parser.parse_args()
    console = Console(stderr=True, soft_wrap=True)
    try:
        rows = asyncio.run(run(options.only or list(SCRIPTS), options.mode or list(MODES), console))
    except KeyboardInterrupt:
        return 130
    Console().print(table(rows))
    result = summary(rows)
    if options.json:
        print(msgspec.json.encode(result).decode())
    return 1 if result["failed"] else 0


async def run(programs: list[str], modes: list[str], console: Console | None = None) -> list[Row]:
    """``console`` is told of each program when it is done."""
    console, rows = console or Console(quiet=True), []
    for mode in modes:
        engine = ScriptedEngine(max_model_len=CONTEXT)
        with tempfile.TemporaryDirectory(prefix="polar-harnesses-") as folder:
            async with engine.serving(), stage(Path(folder), engine.url, mode) as ready:
                for name in programs:
                    engine.script = script(name)
                    row = await ready.run(HarnessSpec(name=name), partial(sampled, engine))
                    console.print(f"{mode} {name}: {'green' if row.green else f'FAILED {row.reason} {row.output}'}")
                    rows.append(row)
    return rows


def sampled(engine: ScriptedEngine) -> list[tuple[list[int], list[int]]]:
    return [(one.prompt_ids, one.ids) for one in engine.sampled]


def script(name: str) -> Script:
    """What the engine replies to ``name``, turn by turn."""
    turns = [
        Plan(content=turn["content"] or "", calls=[(call["name"], call["arguments"]) for call in turn["tool_calls"]])
        for turn in SCRIPTS[name]
    ]
    return by_turn(*turns)


def summary(rows: list[Row]) -> dict[str, Any]:
    """``green`` counts programs that are green in each mode that was run."""
    programs = list(dict.fromkeys(row.harness for row in rows))
    failed = [name for name in programs if not all(row.green for row in rows if row.harness == name)]
    listed = [msgspec.structs.asdict(row) | {"green": row.green} for row in rows]
    for row in listed:
        del row["output"]
    return {"green": len(programs) - len(failed), "failed": len(failed), "failed_programs": failed, "rows": listed}


def table(rows: list[Row]) -> Table:
    found = Table("program", "mode", "calls", "side calls", "traces", "seconds", "exit", "reward", "ids equal", "")
    for row in rows:
        numbers = [row.calls, row.auxiliary, row.traces, row.seconds, row.exit_code, row.reward, row.ids_equal]
        found.add_row(row.harness, row.mode, *map(str, numbers), "green" if row.green else "FAILED")
    return found


if __name__ == "__main__":
    sys.exit(main())
