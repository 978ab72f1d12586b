"""Captures the warm start's traces: scripted demonstrations through the real gateway, Kafka, node, Pi and assembler.

    python -m examples.tiny_policy.capture --base DIR --out traces.jsonl.gz --tasks 320

It starts the project's services on ``--base`` (the untrained policy), with the scripted engine before vLLM, submits
train exercises, waits for their groups to close, and writes each trace as one line: its value on ``polar.traces``.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import os
import sys
from itertools import islice
from pathlib import Path

import msgspec

from polar.admin_api import AdminApi
from polar.demo.tasks import exercises, task
from polar.settings import Settings
from polar.stack import Stack, free_port, plan
from polar.supervisor import Service, Supervisor
from schemas.tasks import TaskSpec
from schemas.traces import GroupClosed, Trace
from streams.consumer import Reader
from streams.topics import TRACES

NOT_NEEDED = ("trainer", "batcher", "weight_loader")
"""Demonstrations are not trained by GRPO; the base model has version 0 from the start."""


def demonstration_stack(run_dir: Path, base: Path, seed: int) -> tuple[Supervisor, Settings]:
    """The services of ``polar up`` without training, and the scripted engine where they look for vLLM."""
    vllm, scripted = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    environ = {**os.environ, "POLAR_ENGINE_URL": scripted, "POLAR_MODEL_DIR": str(base)}
    stack: Stack = plan(environ, run_dir=run_dir)
    python = [sys.executable, "-m"]
    engine = Service(
        name="engine",
        argv=[*python, "polar.engine"],
        environment={"POLAR_ENGINE_URL": vllm},
        ready_url=f"{vllm}/health",
        ready_s=600.0,
    )
    options = ["--engine", vllm, "--port", scripted.rsplit(":", 1)[1], "--model", str(base), "--seed", str(seed)]
    demonstrator = Service(
        name="demonstrator",
        argv=[*python, "examples.tiny_policy.scripted_engine", *options],
        needs=("engine",),
        ready_url=f"{scripted}/health",
        ready_s=120.0,
    )
    wanted = [service for service in stack.services if service.name not in NOT_NEEDED]
    wanted = [
        msgspec.structs.replace(service, needs=(*service.needs, "demonstrator"))
        if service.name == "gateway"
        else service
        for service in wanted
    ]
    planned = msgspec.structs.replace(stack, services=[engine, demonstrator, *wanted])
    return planned.supervisor(environ), stack.settings


def demonstrations(n: int, seed: int) -> list[TaskSpec]:
    """``n`` train exercises, one session each; for evaluation, so that no batch is made of them."""
    return [task(exercise, "eval", 1) for exercise in islice(exercises(seed), n)]


async def collect(bootstrap: str, task_ids: set[str], supervisor: Supervisor) -> list[Trace]:
    """Every usable trace of these tasks, once all their groups have closed."""
    traces: dict[str, Trace] = {}
    open_groups = set(task_ids)
    async with Reader(bootstrap, [TRACES], source="capture", start="beginning") as reader:
        while open_groups:
            supervisor.poll()
            for received in await reader.poll():
                match received.record:
                    case Trace() as trace if trace.task_id in task_ids:
                        traces[trace.trace_id] = trace
                    case GroupClosed() as closed:
                        open_groups.discard(closed.group_id)
                        print(f"\r{len(task_ids) - len(open_groups)} of {len(task_ids)} closed", end="", flush=True)
    print()
    return list(traces.values())


def capture(base: Path, out: Path, n: int, seed: int, run_dir: Path) -> list[Trace]:
    """Runs everything and writes ``out``. Raises the supervisor's and the admin API's own errors."""
    supervisor, settings = demonstration_stack(run_dir, base.absolute(), seed)
    with supervisor:
        supervisor.start(lambda name, seconds: print(f"{name} is ready after {seconds:.0f} s", flush=True))
        specs = demonstrations(n, seed)
        AdminApi(settings.admin_url, settings.admin_key).post("/admin/tasks", specs)
        traces = asyncio.run(collect(settings.kafka_bootstrap, {spec.task_id for spec in specs}, supervisor))
    lines = b"".join(msgspec.json.encode(trace) + b"\n" for trace in traces)
    fresh = out.with_suffix(".new")
    fresh.write_bytes(gzip.compress(lines, mtime=0) if out.suffix == ".gz" else lines)
    fresh.replace(out)
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/capture"))
    arguments = parser.parse_args()
    traces = capture(arguments.base, arguments.out, arguments.tasks, arguments.seed, arguments.run_dir)
    solved = sum(trace.reward for trace in traces) / max(1, len(traces))
    print(f"{arguments.out}: {len(traces)} traces, {100 * solved:.0f} % of them solve their exercise")


if __name__ == "__main__":
    main()
