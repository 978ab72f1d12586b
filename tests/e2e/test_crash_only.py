"""The whole system on real Kafka, real vLLM and real torch, with services killed by SIGKILL in the middle of a run.

Every group has reward variance by construction (the evaluator scores the sample index), and nothing goes stale, so a
calm run trains all of them: the batches must come out gapless and whole, whatever was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tiny_model import build_model

from polar.admin_api import AdminApi, ApiError
from polar.stack import plan
from polar.store.rows import Status
from polar.supervisor import Supervisor
from schemas.batches import BatchSealed, BatchTrace, GroupExcluded
from schemas.tasks import Deadlines, EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec
from schemas.traces import GroupClosed, Trace
from schemas.weights import WeightsPublished
from streams import topics
from streams.consumer import Reader, Received

GROUPS, SAMPLES, BATCH_GROUPS = 12, 2, 2
BATCHES = GROUPS // BATCH_GROUPS
DEADLINE_S = 270.0
KEPT = ("POLAR_KAFKA_LIBS", "POLAR_HARNESS_DIR")

AGENT = """
import json, os, time, urllib.error, urllib.request

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 24}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    for attempt in range(60):
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit("the gateway did not come back")

messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
for turn in range(3):
    reply = ask(messages)
    time.sleep(1)  # what it does between its turns
    messages += [
        {"role": "assistant", "content": reply["content"] or ""},
        {"role": "user", "content": f"turn {turn}, go on"},
    ]
"""


def task(index: int) -> TaskSpec:
    return TaskSpec(
        instruction=f"exercise {index}",
        num_samples=SAMPLES,
        harness=HarnessSpec(name="shell", options={"command": "python3 agent.py"}),
        runtime=RuntimeSpec(files={"agent.py": AGENT}),
        evaluator=EvaluatorSpec(command='echo "$POLAR_SAMPLE_INDEX" > reward', reward_file="reward"),
        deadlines=Deadlines(init_s=30, agent_s=60, evaluation_s=30),
        max_attempts=8,
    )


TASKS = [task(index) for index in range(GROUPS)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[tuple[Supervisor, AdminApi, str]]:
    model = build_model(tmp_path / "model", seed=3)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("POLAR_") or k in KEPT}
    planned = plan(
        environ | {"POLAR_MODEL_DIR": str(model)},
        run_dir=tmp_path / "run",
        batch_groups=BATCH_GROUPS,
        learning_rate=1e-4,
        staleness_limit=BATCHES,
        assembly_grace_s=3.0,
    )
    with planned.supervisor(environ) as supervisor:
        supervisor.start()
        yield supervisor, AdminApi(planned.settings.admin_url), planned.settings.kafka_bootstrap


def wait(supervisor: Supervisor, api: AdminApi, condition: Callable[[Status], bool], deadline: float) -> Status:
    last: Status | None = None
    while time.monotonic() < deadline:
        supervisor.poll()
        try:
            last = api.get("/admin/status", Status)
        except ApiError:
            last = None
        if last is not None and condition(last):
            return last
        time.sleep(0.2)
    raise AssertionError(f"not reached in time; the last status was {last}; restarts {supervisor.restarts}")


def kill(supervisor: Supervisor, name: str) -> None:
    os.kill(int(supervisor.pid_path(name).read_text()), signal.SIGKILL)


def everything(bootstrap: str, topic: str) -> list[Received]:
    async def read() -> list[Received]:
        async with Reader(bootstrap, [topic], source="test", start="beginning") as reader:
            return await reader.read_to_end()

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.engine
@pytest.mark.timeout(420)
def test_services_killed_in_the_middle_lose_and_double_nothing(stack: tuple[Supervisor, AdminApi, str]) -> None:
    supervisor, api, bootstrap = stack
    deadline = time.monotonic() + DEADLINE_S
    wait(supervisor, api, lambda status: 0 in status.versions_loaded.values(), deadline)
    api.post("/admin/tasks", TASKS)

    for version, name in ((1, "trainer"), (2, "assembler"), (3, "node"), (4, "gateway")):
        wait(supervisor, api, lambda status, v=version: (status.version_published or 0) >= v, deadline)
        kill(supervisor, name)
    assert api.get("/admin/status", Status).last_batch < BATCHES, "the last kill came after the end"
    wait(supervisor, api, lambda status: BATCHES in status.versions_loaded.values(), deadline)
    assert all(supervisor.restarts[name] >= 1 for name in ("trainer", "assembler", "node", "gateway"))

    batches = [r.record for r in everything(bootstrap, topics.BATCHES)]
    seals = [r for r in batches if isinstance(r, BatchSealed)]
    assert [seal.batch for seal in seals] == list(range(1, BATCHES + 1))
    assert sorted(group.group_id for seal in seals for group in seal.groups) == sorted(t.task_id for t in TASKS)
    assert not [r for r in batches if isinstance(r, GroupExcluded)]
    assert all(sorted(s.reward for s in g.sessions) == [0.0, 1.0] for seal in seals for g in seal.groups)

    trained = [r.trace for r in batches if isinstance(r, BatchTrace)]
    assert len({trace.trace_id for trace in trained}) == len(trained) == sum(seal.traces for seal in seals)
    assert {trace.session_id for trace in trained} == {
        s.session_id for b in seals for g in b.groups for s in g.sessions
    }

    records = [r.record for r in everything(bootstrap, topics.TRACES)]
    assert len([r for r in records if isinstance(r, GroupClosed)]) == GROUPS
    by_id = {r.trace_id: r for r in records if isinstance(r, Trace)}
    assert all(msgspec.structs.replace(by_id[t.trace_id], at=t.at) == t for t in trained)

    published = {
        r.record.version: r.record
        for r in everything(bootstrap, topics.WEIGHTS)
        if isinstance(r.record, WeightsPublished)
    }
    assert sorted(published) == list(range(BATCHES + 1))
    on_policy = [w.metrics["logprob_mismatch"] for w in published.values() if "logprob_mismatch" in w.metrics]
    assert on_policy and max(on_policy) < 1e-3  # nats, captured by the gateway against recomputed by the trainer
    wait(supervisor, api, lambda s: s.last_batch == BATCHES and s.traces == len(by_id), deadline)
