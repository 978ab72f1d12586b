"""Real agent programs on the real line: scheduler, node with its sandboxes, gateway, Kafka, assembler.

The engine is given. One program after the other does one task, and what the log then holds is compared with what the
engine sampled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from polar.stack import plan
from polar.supervisor import Supervisor
from polar.trajectories import Story, whole_calls
from schemas.ids import derived_id, new_id
from schemas.packed import unpack_ids, unpack_mask
from schemas.scheduling import SessionAssembled
from schemas.sessions import CallStarted, HarnessExited, SessionEvent, SessionScored
from schemas.tasks import Deadlines, EvaluatorSpec, HarnessSpec, Limits, RuntimeSpec, TaskSpec, TaskSubmitted
from schemas.traces import Trace
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS, TASKS, TRACES

SERVICES = ("kafka", "admin", "gateway", "scheduler", "node", "assembler")
KEPT = ("POLAR_KAFKA_LIBS", "POLAR_HARNESS_DIR")
INSTRUCTION = "Write a file hello.txt that holds the text hello, then finish."
CHECK = "grep -q hello hello.txt"
AGENT_S = 150.0

Sampled = Callable[[], list[tuple[list[int], list[int]]]]
"""The (prompt ids, sampled ids) of each call that the engine has sampled."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one program. ``traces`` and ``ids_equal`` leave out calls that are no turn of the agent."""

    harness: str
    mode: str
    calls: int
    auxiliary: int
    traces: int
    exact_calls: int
    seconds: float
    exit_code: int | None
    reward: float | None
    ids_equal: bool
    reason: str = ""
    output: str = ""

    @property
    def green(self) -> bool:
        one_trace = self.traces == 1 if self.mode == "exact" else self.traces >= 1
        return self.exit_code == 0 and self.reward == 1.0 and self.calls > 0 and one_trace and self.ids_equal


class Stage:
    """The line, ready for tasks."""

    def __init__(self, bootstrap: str, mode: str) -> None:
        self._bootstrap = bootstrap
        self._mode = mode

    async def run(self, harness: HarnessSpec, sampled: Sampled, **more: Any) -> Row:
        """One task by ``harness``. ``more`` are fields of its TaskSpec. Raises TimeoutError."""
        task = TaskSpec(
            task_id=new_id(),
            instruction=INSTRUCTION,
            harness=harness,
            num_samples=1,
            evaluator=EvaluatorSpec(command=CHECK),
            runtime=RuntimeSpec(limits=Limits(memory_mb=4096, processes=512)),
            deadlines=Deadlines(init_s=60, agent_s=AGENT_S, evaluation_s=30),
            max_attempts=1,
            **more,
        )
        session = derived_id("session", task.task_id, 0)
        before = len(sampled())
        async with Producer(self._bootstrap, source="test") as producer:
            await producer.send(TASKS, TaskSubmitted(task=task))
        verdict = await self._verdict(session)
        events = await self._of(SESSIONS, session, SessionEvent)
        traces = await self._of(TRACES, session, Trace)
        return self._row(harness.name, verdict, events, traces, sampled()[before:])

    async def _verdict(self, session: str) -> SessionAssembled:
        async with asyncio.timeout(AGENT_S + 90), Reader(self._bootstrap, [SCHEDULER], source="test") as reader:
            while True:
                for received in await reader.poll(0.5):
                    record = received.record
                    if isinstance(record, SessionAssembled) and record.session_id == session:
                        return record

    async def _of(self, topic: str, session: str, kind: type) -> list[Any]:
        async with Reader(self._bootstrap, [topic], source="test") as reader:
            records = [one.record for one in await reader.read_to_end()]
        return [record for record in records if isinstance(record, kind) and record.session_id == session]

    def _row(
        self, harness: str, verdict: SessionAssembled, events: list[Any], traces: list[Trace], sampled: list[Any]
    ) -> Row:
        story = Story(verdict.session_id)
        for event in events:
            story.add(event)
        starts = [event for event in events if isinstance(event, CallStarted)]
        exited = next((event for event in events if isinstance(event, HarnessExited)), None)
        scored = next((event for event in events if isinstance(event, SessionScored)), None)
        return Row(
            harness=harness,
            mode=self._mode,
            calls=len(starts),
            auxiliary=sum(start.auxiliary is not None for start in starts),
            traces=len(traces),
            exact_calls=sum(start.history == "exact" for start in starts),
            seconds=round(exited.seconds, 2) if exited else 0.0,
            exit_code=exited.exit_code if exited else None,
            reward=scored.reward if scored else None,
            ids_equal=_same_ids(story, sampled) and _trained_as_sampled(story, traces),
            reason=verdict.reason,
            output=f"{exited.stdout[-1500:]}\n{exited.stderr[-1500:]}" if exited else "",
        )


def _same_ids(story: Story, sampled: list[tuple[list[int], list[int]]]) -> bool:
    """Each captured call is one that the engine sampled, id for id, and none is missing."""
    captured = [(call.prompt_ids.tolist(), call.response_ids.tolist()) for call in whole_calls(story)]
    return bool(captured) and sorted(captured) == sorted((list(prompt), list(ids)) for prompt, ids in sampled)


def _trained_as_sampled(story: Story, traces: list[Trace]) -> bool:
    """The trained ids of the traces are those of the turns, each once."""
    turns = sorted(call.response_ids.tolist() for call in whole_calls(story) if call.trained)
    spans: list[list[int]] = []
    for trace in traces:
        ids, mask = unpack_ids(trace.response_ids), unpack_mask(trace.loss_mask)
        spans += [ids[span.start : span.end].tolist() for span in trace.spans if mask[span.start]]
    return sorted(spans) == turns


@asynccontextmanager
async def stage(run_dir: Path, engine_url: str, mode: str) -> AsyncIterator[Stage]:
    """``mode``: exact, or chat for an engine without token endpoints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_") or name in KEPT}
    given = {"POLAR_ENGINE_URL": engine_url, "POLAR_ENGINE_API": "chat" if mode == "chat" else "tokens"}
    planned = plan(environ | given, run_dir=run_dir, assembly_grace_s=3.0)
    services = [service for service in planned.services if service.name in SERVICES]
    with msgspec.structs.replace(planned, services=services).supervisor(environ) as supervisor:
        await asyncio.to_thread(supervisor.start)
        watching = asyncio.create_task(_watch(supervisor))
        try:
            yield Stage(planned.settings.kafka_bootstrap, mode)
        finally:
            watching.cancel()


async def _watch(supervisor: Supervisor) -> None:
    while True:
        supervisor.poll()
        await asyncio.sleep(0.5)
