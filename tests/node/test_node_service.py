"""The node service on a real broker: what it publishes, in which order, and what a kill leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from consumers.node import run_node
from polar.session_token import load_secret, verify
from polar.settings import Settings, SettingsError, to_environment
from schemas.ids import new_id
from schemas.scheduling import (
    Cancel,
    NodeHeartbeat,
    NodeLost,
    NodeRegistered,
    Prewarm,
    Run,
    SessionExited,
    SessionFinished,
    SessionReady,
    SessionRunning,
)
from schemas.sessions import HarnessExited, SessionClosed, SessionOpened, SessionScored
from schemas.tasks import Budget, Deadlines, EvaluatorSpec, HarnessSpec, RuntimeSpec, SamplingSpec, TaskSpec
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS

pytestmark = pytest.mark.kafka
DEADLINE_S = 30.0


def shell_task(command="true", *, evaluate="true", prepare=(), reward_file=None, **deadlines):
    return TaskSpec(
        instruction="do it",
        harness=HarnessSpec(name="shell", options={"command": command}),
        runtime=RuntimeSpec(prepare=list(prepare)),
        evaluator=EvaluatorSpec(command=evaluate, reward_file=reward_file),
        deadlines=Deadlines(**deadlines),
    )


class Scheduler:
    """A test in the scheduler's place: sends commands, and reads what the node answers."""

    def __init__(self, producer, reader, node_id):
        self.producer, self.reader, self.node_id = producer, reader, node_id
        self.records = []
        self._seen = 0

    async def until(self, kind, session_id=None):
        """The next record of this kind (about this session), after the one that was found last."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._seen < len(self.records):
                    record = self.records[self._seen]
                    self._seen += 1
                    if isinstance(record, kind) and session_id in (None, getattr(record, "session_id", None)):
                        return record
                self.records += [r.record for r in await self.reader.poll(0.2) if self._mine(r.record)]

    def _mine(self, record):
        return getattr(record, "node_id", self.node_id) == self.node_id

    def about(self, session_id, *, reports=True):
        """What the node wrote about a session: on polar.scheduler, or on polar.sessions."""
        kinds = (SessionReady, SessionRunning, SessionExited, SessionFinished)
        own = [r for r in self.records if getattr(r, "session_id", None) == session_id]
        if reports:
            return [r for r in own if isinstance(r, kinds)]
        return [r for r in own if isinstance(r, (SessionOpened, HarnessExited, SessionScored, SessionClosed))]

    async def registered(self):
        self.incarnation = (await self.until(NodeRegistered)).incarnation

    async def command(self, kind, session_id, attempt=1, **fields):
        slot = {"node_id": self.node_id, "incarnation": self.incarnation}
        await self.producer.send(SCHEDULER, kind(**slot, session_id=session_id, attempt=attempt, **fields))

    async def prewarm(self, task, attempt=1, session_id=None):
        session_id = session_id or new_id()
        await self.command(Prewarm, session_id, attempt, task=task, sample_index=3)
        return session_id

    async def run_to_end(self, task):
        session_id = await self.prewarm(task)
        await self.until(SessionReady, session_id)
        await self.command(Run, session_id)
        return session_id, await self.until(SessionFinished, session_id)

    async def story(self, session_id):
        """All that is on polar.sessions about a session, now that its node is done with it."""
        self.records += [r.record for r in await self.reader.read_to_end() if self._mine(r.record)]
        return self.about(session_id, reports=False)


@pytest.fixture
def settings(kafka, tmp_path):
    return Settings(run_dir=tmp_path, kafka_bootstrap=kafka, node_id=f"node-{new_id()}", gateway_url="http://g:1/")


@asynccontextmanager
async def scheduler_of(settings):
    async with Producer(settings.kafka_bootstrap, source="test") as producer:
        async with Reader(settings.kafka_bootstrap, [SCHEDULER, SESSIONS], source="test", start="end") as reader:
            yield Scheduler(producer, reader, settings.node_id)


@pytest.fixture
async def node(settings):
    """A node in this process, and a test in the scheduler's place."""
    stop = asyncio.Event()
    async with scheduler_of(settings) as scheduler:
        service = asyncio.create_task(run_node(settings, stop))
        await scheduler.registered()
        scheduler.service = service
        yield scheduler
        stop.set()
        if not service.done():
            await service
    assert not (settings.run_dir / "sessions" / settings.node_id).exists()


async def test_a_session_from_prewarm_to_finished(node, settings):
    command = 'echo "$POLAR_BASE_URL" > url; env | grep ^POLAR_ | sort; echo "$POLAR_BASE_URL" >&2; exit 5'
    task = shell_task(command, evaluate='echo "$POLAR_SAMPLE_INDEX" > r; test -s url', reward_file="r")
    session_id, finished = await node.run_to_end(task)
    assert [type(r) for r in node.about(session_id)] == [SessionReady, SessionRunning, SessionExited, SessionFinished]
    assert finished.outcome == "completed"
    opened, exited, scored, closed = await node.story(session_id)
    assert isinstance(opened, SessionOpened) and isinstance(exited, HarnessExited)
    assert (opened.task_id, opened.group_id, opened.sample_index) == (task.task_id, task.task_id, 3)
    assert (opened.harness, opened.node_id, opened.attempt) == ("shell", settings.node_id, 1)
    assert (exited.exit_code, exited.timed_out) == (5, False)
    assert (scored.reward, scored.error, scored.evaluator) == (3.0, None, "command")
    assert closed.outcome == "completed"
    assert f"POLAR_SESSION_ID={session_id}" in exited.stdout and "POLAR_ATTEMPT=1" in exited.stdout
    assert exited.stderr == "http://g:1/s/[token]/v1\n", "no token reaches a topic"


async def test_the_agent_gets_a_token_of_its_attempt_with_what_the_task_fixes(node, settings):
    keep = shell_task('echo "$POLAR_BASE_URL" | cut -d/ -f5 | rev')
    fixed, allowed = SamplingSpec(temperature=0.5, stop=["é"]), Budget(calls=3)
    task = msgspec.structs.replace(keep, sampling=fixed, budget=allowed)
    session_id, _ = await node.run_to_end(task)
    exited = (await node.story(session_id))[1]
    token = verify(load_secret(settings), exited.stdout.strip()[::-1])
    assert (token.session_id, token.attempt) == (session_id, 1)
    assert (token.sampling, token.budget) == (task.session_sampling, allowed)
    assert token.sampling.temperature == 0.5 and token.sampling.top_p == 1.0


async def test_an_agent_that_uses_up_its_deadline_is_still_scored(node):
    session_id, finished = await node.run_to_end(
        shell_task("echo half > work.txt; sleep 97001 & sleep 97001", evaluate="grep -q half work.txt", agent_s=0.6)
    )
    assert finished.outcome == "agent_timeout"
    _, exited, scored, closed = await node.story(session_id)
    assert (exited.exit_code, exited.timed_out, scored.reward) == (None, True, 1.0)
    assert closed.outcome == "agent_timeout" and "deadline" in closed.reason


async def test_an_evaluators_failure_is_no_reward(node):
    session_id, _ = await node.run_to_end(shell_task(evaluate="echo nan > r", reward_file="r"))
    scored = (await node.story(session_id))[2]
    assert scored.reward is None and "not finite" in scored.error


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (shell_task(prepare=["true", "echo cannot >&2; exit 4"]), "prepare[1] failed: exit code 4: cannot"),
        (shell_task(prepare=["sleep 60"], init_s=0.4), "deadline"),
        (TaskSpec(instruction="x", harness=HarnessSpec(name="?"), evaluator=EvaluatorSpec(command="true")), "unknown"),
        (TaskSpec(instruction="x", evaluator=EvaluatorSpec(kind="judge", command="true")), "evaluator.kind"),
        (
            TaskSpec(instruction="x", runtime=RuntimeSpec(kind="moon"), evaluator=EvaluatorSpec(command="true")),
            "runtime.kind",
        ),
    ],
)
async def test_a_failed_init_opens_no_session(node, task, reason):
    session_id = await node.prewarm(task)
    finished = await node.until(SessionFinished, session_id)
    assert finished.outcome == "infrastructure" and reason in finished.reason and "\n" not in finished.reason
    assert await node.story(session_id) == []
    assert [type(r) for r in node.about(session_id)] == [SessionFinished]


async def test_cancel_in_every_stage(node, settings):
    preparing = await node.prewarm(shell_task(prepare=["touch here; sleep 97002"]))
    folder = settings.run_dir / "sessions" / settings.node_id / f"{preparing}-1"
    async with asyncio.timeout(DEADLINE_S):
        while not (folder / "work" / "here").exists():
            await asyncio.sleep(0.01)
    await node.command(Cancel, preparing, reason="a")
    ready = await node.prewarm(shell_task())
    await node.until(SessionReady, ready)
    await node.command(Cancel, ready, reason="b")
    running = await node.prewarm(shell_task("sleep 97002"))
    await node.until(SessionReady, running)
    await node.command(Run, running)
    await node.until(SessionRunning, running)
    await node.command(Cancel, running, reason="c")
    await node.until(SessionFinished, running)
    scoring = await node.prewarm(shell_task(evaluate="sleep 97002"))
    await node.until(SessionReady, scoring)
    await node.command(Run, scoring)
    await node.until(SessionExited, scoring)
    await node.command(Cancel, scoring, reason="d")
    await node.command(Cancel, scoring, reason="again")
    await node.until(SessionFinished, scoring)
    for session_id, reason, story in (
        (preparing, "a", []),
        (ready, "b", []),
        (running, "c", [SessionOpened, HarnessExited, SessionClosed]),
        (scoring, "d", [SessionOpened, HarnessExited, SessionClosed]),
    ):
        assert [type(r) for r in await node.story(session_id)] == story
        finished = [r for r in node.about(session_id) if isinstance(r, SessionFinished)]
        assert [(r.outcome, r.reason) for r in finished] == [("cancelled", reason)]
    assert not folder.parent.exists() or list(folder.parent.iterdir()) == []
    await node.until(NodeHeartbeat)
    heartbeat = await node.until(NodeHeartbeat)
    assert (heartbeat.preparing, heartbeat.ready, heartbeat.running, heartbeat.postrun) == (0, 0, 0, 0)


async def test_repeated_commands_and_those_to_a_former_incarnation_do_nothing(node):
    task = shell_task("echo run >> runs; wc -l < runs")
    session_id = await node.prewarm(task)
    await node.prewarm(task, session_id=session_id)
    await node.until(SessionReady, session_id)
    current, node.incarnation = node.incarnation, "former"
    stranger = await node.prewarm(task)
    node.incarnation = current
    for _ in range(2):
        await node.command(Run, session_id)
    await node.until(SessionFinished, session_id)
    await node.command(Run, session_id)
    await node.prewarm(task, session_id=session_id)
    again, _ = await node.run_to_end(task)
    story = await node.story(session_id)
    assert [type(r) for r in story] == [SessionOpened, HarnessExited, SessionScored, SessionClosed]
    assert story[1].stdout.strip() == "1"
    assert len(node.about(session_id)) == 4 and len(node.about(again)) == 4 and node.about(stranger) == []


async def test_sessions_run_side_by_side_within_the_slots(node):
    task = shell_task("sleep 0.2", evaluate="sleep 0.1")
    sessions = [await node.prewarm(task) for _ in range(4)]
    for session_id in sessions:
        await node.command(Run, session_id)  # too early, void
    for _ in sessions:
        await node.command(Run, (await node.until(SessionReady)).session_id)
    for _ in sessions:
        assert (await node.until(SessionFinished)).outcome == "completed"
    assert sorted(r.session_id for r in node.records if isinstance(r, SessionExited)) == sorted(sessions)


async def test_a_lost_lease_ends_the_sandboxes_and_registers_anew(node):
    session_id = await node.prewarm(shell_task("sleep 97003"))
    await node.until(SessionReady, session_id)
    await node.command(Run, session_id)
    await node.until(SessionRunning, session_id)
    lost = NodeLost(node_id=node.node_id, incarnation=node.incarnation, reason="no heartbeat")
    await node.producer.send(SCHEDULER, lost)
    former = node.incarnation
    await node.registered()
    assert node.incarnation != former
    assert alive("97003") == []
    await node.prewarm(shell_task(), attempt=2, session_id=session_id)
    assert (await node.until(SessionReady, session_id)).attempt == 2


async def test_a_second_node_of_the_same_name_ends_the_first(node):
    other = NodeRegistered(
        node_id=node.node_id, incarnation="other", init_slots=1, ready_slots=1, run_slots=1, postrun_slots=1
    )
    await node.producer.send(SCHEDULER, other)
    with pytest.raises(ExceptionGroup) as group:
        await asyncio.wait_for(node.service, DEADLINE_S)
    assert "POLAR_NODE_ID" in str(group.value.exceptions[0])


def alive(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [folder.name] if marker.encode() in words else []
    return found


async def start_process(settings):
    environment = {**os.environ, **to_environment(settings)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "consumers.node", env=environment, stderr=asyncio.subprocess.PIPE
    )


async def test_killed_and_started_again(settings):
    async with scheduler_of(settings) as scheduler:
        first = await start_process(settings)
        await scheduler.registered()
        session_id = await scheduler.prewarm(shell_task("setsid sleep 97004 & sleep 97004"))
        await scheduler.until(SessionReady, session_id)
        await scheduler.command(Run, session_id)
        await scheduler.until(SessionRunning, session_id)
        folder = settings.run_dir / "sessions" / settings.node_id / f"{session_id}-1"
        async with asyncio.timeout(DEADLINE_S):
            while len(alive("97004")) < 2:
                await asyncio.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        async with asyncio.timeout(DEADLINE_S):
            while alive("97004"):
                await asyncio.sleep(0.02)
        assert folder.exists()
        second, former = await start_process(settings), scheduler.incarnation
        await scheduler.registered()
        assert scheduler.incarnation != former and not folder.exists()
        second.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(second.wait(), DEADLINE_S) == 0


@pytest.mark.parametrize("name", ["a/b", "..", "/"])
async def test_a_node_id_is_one_plain_name(settings, name):
    with pytest.raises(SettingsError, match="POLAR_NODE_ID"):
        await run_node(msgspec.structs.replace(settings, node_id=name), asyncio.Event())


async def test_no_broker_is_one_line_and_exit_code_1(settings):
    nowhere = Settings(run_dir=settings.run_dir, kafka_bootstrap="127.0.0.1:1", node_id="n")
    process = await start_process(nowhere)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    last = stderr.decode().strip().splitlines()[-1]
    assert "127.0.0.1:1" in last and "Traceback" not in stderr.decode()
