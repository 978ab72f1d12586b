"""What a node does for one session in each stage, and what it publishes about it.

A stage's work can be interrupted by a Cancel; what is published about it cannot. So a session whose agent has started
always has opened, exited and closed on ``polar.sessions``, in that order, and every Prewarm ends in one finished
report. An error of Kafka ends the whole node: then the log decides what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from polar.evaluators import EVALUATORS, Score
from polar.harnesses import HarnessError, program
from polar.runtimes.runtime import TAIL_BYTES, Ended, Program, Runtime, RuntimeFault, Sandbox
from polar.session_token import sign
from schemas.scheduling import Prewarm, SessionExited, SessionFinished, SessionReady, SessionRunning
from schemas.sessions import HarnessExited, Outcome, SessionClosed, SessionOpened, SessionScored
from schemas.tasks import TaskSpec
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS

T = TypeVar("T")

TOKEN_MARGIN_S = 60.0
"""A token outlives the agent's deadline by so much: the gateway's clock may be another one's."""


class Services(msgspec.Struct, frozen=True):
    """What every session of a node uses."""

    producer: Producer
    runtime: Runtime
    secret: str
    gateway_url: str


class LiveSession:
    """One attempt of one session on this node. The methods named after stages are called one after another."""

    def __init__(self, prewarm: Prewarm, services: Services) -> None:
        self._prewarm, self._task = prewarm, prewarm.task
        self._services = services
        self._sandbox: Sandbox | None = None
        self._work: asyncio.Future[Any] | None = None
        self._token = ""
        self._stopped = False
        self._opened = False
        self._note = ""
        self._slot: dict[str, Any] = {
            "node_id": prewarm.node_id,
            "incarnation": prewarm.incarnation,
            "session_id": prewarm.session_id,
            "attempt": prewarm.attempt,
        }
        self._about: dict[str, Any] = {"session_id": prewarm.session_id, "attempt": prewarm.attempt}

    def stop(self) -> None:
        """Ends the work of the present stage, or of the one that is about to start."""
        self._stopped = True
        if self._work is not None:
            self._work.cancel()

    async def prepare(self) -> str | None:
        """INIT. Returns the fault, or None."""
        try:
            return await self._interruptible(self._make_sandbox())
        except (RuntimeFault, HarnessError) as error:
            return str(error)

    async def announce(self) -> None:
        await self._services.producer.send(SCHEDULER, SessionReady(**self._slot))

    async def launch(self) -> tuple[bool, str | None]:
        """RUNNING. Returns whether the deadline ended the agent, and the fault, or None."""
        await self._open()
        fault, ended = None, None
        try:
            agent = self._agent()
            ended = await self._interruptible(self._made().run(agent, self._task.deadlines.agent_s))
        except (RuntimeFault, HarnessError) as error:
            fault = str(error)
        if ended is None:
            reason = fault or "cancelled"
            ended = Ended(exit_code=None, timed_out=False, over_memory=False, seconds=0.0, stdout="", stderr=reason)
        self._note = ended.reason
        exited = HarnessExited(
            **self._about,
            exit_code=ended.exit_code,
            timed_out=ended.timed_out,
            seconds=ended.seconds,
            stdout=self._tail(ended.stdout),
            stderr=self._tail(ended.stderr),
        )
        await self._services.producer.send(SESSIONS, exited)
        await self._services.producer.send(SCHEDULER, SessionExited(**self._slot))
        return ended.timed_out, fault

    async def score(self) -> None:
        """POSTRUN. A cancelled one publishes no score."""
        spec = self._task.evaluator
        evaluating = EVALUATORS[spec.kind](spec, self._made(), self._environment(), self._task.deadlines.evaluation_s)
        try:
            score = await self._interruptible(evaluating)
        except RuntimeFault as error:
            score = Score(reward=None, error=str(error))
        if score is None:
            return
        detail = {name: self._tail(value) if isinstance(value, str) else value for name, value in score.detail.items()}
        scored = SessionScored(
            **self._about, reward=score.reward, evaluator=spec.kind, error=score.error, detail=detail
        )
        await self._services.producer.send(SESSIONS, scored)

    async def finish(self, outcome: Outcome, reason: str) -> None:
        """Closes the story if one was opened, removes the folders, and reports."""
        reason = reason or self._note
        if self._opened:
            await self._services.producer.send(SESSIONS, SessionClosed(**self._about, outcome=outcome, reason=reason))
        if self._sandbox is not None:
            await self._sandbox.close()
        await self._services.producer.send(SCHEDULER, SessionFinished(**self._slot, outcome=outcome, reason=reason))

    async def _make_sandbox(self) -> str | None:
        task, loop = self._task, asyncio.get_running_loop()
        if wrong := unknown_part(task):
            return wrong
        program(task.harness, task.instruction, "http://gateway.invalid/s/token")
        deadline = loop.time() + task.deadlines.init_s
        self._sandbox = await self._services.runtime.create("-".join(map(str, self._about.values())), task.runtime)
        for number, command in enumerate(task.runtime.prepare):
            step = Program(argv=["bash", "-o", "pipefail", "-c", command], environment=self._environment())
            ended = await self._sandbox.run(step, max(0.0, deadline - loop.time()))
            if ended.exit_code != 0:
                last = ended.reason or f"exit code {ended.exit_code}: {ended.stderr.strip()[-200:]}"
                return f"runtime.prepare[{number}] failed: {last}"
        return None

    async def _open(self) -> None:
        prewarm, task = self._prewarm, self._task
        opened = SessionOpened(
            **self._about,
            task_id=task.task_id,
            group_id=task.group_id,
            sample_index=prewarm.sample_index,
            policy=task.policy,
            purpose=task.purpose,
            harness=task.harness.name,
            builder=task.builder,
            node_id=prewarm.node_id,
        )
        self._opened = True
        await self._services.producer.send(SESSIONS, opened)
        await self._services.producer.send(SCHEDULER, SessionRunning(**self._slot))

    def _agent(self) -> Program:
        task, about = self._task, self._about
        self._token = sign(
            self._services.secret,
            **about,
            ttl_s=task.deadlines.agent_s + TOKEN_MARGIN_S,
            sampling=task.session_sampling,
            budget=task.budget,
        )
        root = f"{self._services.gateway_url.rstrip('/')}/s/{self._token}"
        agent = program(self._task.harness, self._task.instruction, root)
        given = {"POLAR_ROOT_URL": root, "POLAR_BASE_URL": f"{root}/v1"}
        return msgspec.structs.replace(agent, environment={**self._environment(), **given, **agent.environment})

    def _environment(self) -> dict[str, str]:
        return {
            "POLAR_SESSION_ID": self._prewarm.session_id,
            "POLAR_SAMPLE_INDEX": str(self._prewarm.sample_index),
            "POLAR_ATTEMPT": str(self._prewarm.attempt),
        }

    def _made(self) -> Sandbox:
        assert self._sandbox is not None, "RUNNING and POSTRUN come after INIT"
        return self._sandbox

    def _tail(self, text: str) -> str:
        """The end of a program's output, without the session's token, which must not reach a topic."""
        if self._token:
            text = text.replace(self._token, "[token]")
        return text.encode()[-TAIL_BYTES:].decode("utf-8", "ignore")

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``, or None when ``stop`` ended it. Nothing of it goes on when this returns."""
        if self._stopped:
            work.close()
            return None
        self._work = running = asyncio.ensure_future(work)
        try:
            await asyncio.wait({running})
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        return None if running.cancelled() else running.result()


def unknown_part(task: TaskSpec) -> str | None:
    """The part of a task that this node has no implementation of, in one line; or None."""
    if task.evaluator.kind not in EVALUATORS:
        return f"evaluator.kind {task.evaluator.kind!r} is unknown: use one of {', '.join(sorted(EVALUATORS))}"
    if task.runtime.kind != "local":
        return f"runtime.kind {task.runtime.kind!r} is unknown: use local"
    return None
