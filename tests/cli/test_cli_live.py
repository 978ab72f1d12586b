"""The polar command against a real admin API over a real broker."""

import asyncio
import json
import os
import sys
import time

import pytest
from session_stories import completed, opened, started

from polar.cli import main
from polar.stack import free_port
from polar.supervisor import Service, Supervisor
from schemas.ids import derived_id, new_id
from schemas.packed import pack_ids, pack_logprobs
from schemas.scheduling import NodeHeartbeat, NodeRegistered
from schemas.sessions import CallDelivery, HarnessExited, Sampling, SessionClosed, SessionScored
from schemas.weights import Probe, WeightsLoaded, WeightsPublished
from streams.producer import Producer
from streams.topics import SCHEDULER, SESSIONS, WEIGHTS

SESSION = derived_id("session", "t-1", 0)
FACTS = {"thread_id": "explorer", "history_note": "images", "sampling": Sampling(temperature=0.5, max_tokens=64)}
NODE = {"node_id": "node-7", "incarnation": "i"}


@pytest.fixture(scope="module")
def url(kafka, tmp_path_factory):
    """An admin API that knows one session, one node and one weight version."""
    run_dir, port = tmp_path_factory.mktemp("run"), free_port()
    environment = {
        **os.environ,
        "POLAR_RUN_DIR": str(run_dir),
        "POLAR_ADMIN_PORT": str(port),
        "POLAR_KAFKA_BOOTSTRAP": kafka,
    }
    url = f"http://127.0.0.1:{port}"
    admin = Service(name="admin", argv=[sys.executable, "-m", "gateway_app.admin"], ready_url=f"{url}/health")
    with Supervisor([admin], run_dir, environment=environment) as supervisor:
        supervisor.start()
        asyncio.run(publish(kafka))
        yield url


async def publish(bootstrap):
    event = {"session_id": SESSION, "attempt": 0}
    story = [
        opened(SESSION, group="t-1"),
        started(1, [1, 2, 3], SESSION, messages=[{"role": "user", "content": "list [the] files"}], **FACTS),
        completed(1, [4, 5], SESSION, message={"role": "assistant", "content": "here they are"}),
        CallDelivery(**event, call_id=f"{SESSION}-0-c1", delivered=True),
        HarnessExited(**event, exit_code=0, timed_out=False, seconds=0.5),
        SessionScored(**event, reward=1.0, evaluator="command"),
        SessionClosed(**event, outcome="completed"),
    ]
    probe = Probe(prompt_ids=pack_ids([1, 2]), logprobs=pack_logprobs([-1.0]))
    weights = [
        WeightsPublished(policy="policy", version=0, path="/models/base", sha256="0" * 64, probe=probe),
        WeightsLoaded(
            policy="policy",
            version=0,
            engine_id="engine-1",
            probe_mean_difference=1e-6,
            probe_max_difference=2e-6,
            seconds=0.1,
        ),
    ]
    slots = {"init_slots": 2, "ready_slots": 4, "run_slots": 4, "postrun_slots": 2}
    async with Producer(bootstrap, source="test") as producer:
        for topic, records in (
            (SESSIONS, story),
            (WEIGHTS, weights),
            (SCHEDULER, [NodeRegistered(**NODE, **slots), NodeHeartbeat(**NODE)]),
        ):
            for record in records:
                await producer.send(topic, record)


@pytest.fixture
def polar(url, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            main(["--url", url, *arguments])
        captured = capsys.readouterr()
        assert exit.value.code == 0, captured.err
        return captured.out

    return run


def until(ask, *words, deadline_s=20.0):
    """Asks again until the recorder has caught up."""
    end = time.monotonic() + deadline_s
    while not all(word in (out := ask()) for word in words):
        assert time.monotonic() < end, out
    return out


def test_status_shows_nodes_and_weights(polar):
    out = until(lambda: polar("status"), "node-7", "published v0", "v0 (engine-1)", "splits")
    assert "READY" in out and "0/4" in out and "1 images" in out and "engine ↔ trainer 1.0e-06" in out


def test_a_session_is_listed_and_shown_turn_by_turn(polar):
    until(lambda: polar("sessions"), SESSION, "shell")
    out = until(lambda: polar("show", SESSION[-8:]), "reward 1", "turn 1")
    assert "list [the] files" in out and "here they are" in out
    assert "3 prompt tokens, 2 sampled by v0" in out
    assert "  thread explorer, template history (images), temperature 0.5, max_tokens 64\n" in out


def test_a_session_that_is_not_there_is_one_line(url, capsys):
    for wanted in ("nobody", new_id()):
        with pytest.raises(SystemExit) as exit:
            main(["--url", url, "show", wanted])
        err = capsys.readouterr().err
        assert exit.value.code == 1 and err.count("\n") == 1 and "no session" in err


def test_a_tail_tells_a_story_in_readable_lines(polar):
    lines = polar("topics", "tail", "polar.sessions", "--no-follow").splitlines()
    assert [line.split("#0  ")[1].split("  ")[0] for line in lines] == [
        "opened",
        "call 1 started",
        "call completed",
        "call delivered",
        "agent exited",
        "scored",
        "closed",
    ]
    assert all(SESSION[-8:] in line for line in lines)
    raw = polar("topics", "tail", "polar.sessions", "--no-follow", "--json", "--session", SESSION[:8], "-n", "2")
    assert [json.loads(line)["record"]["type"] for line in raw.splitlines()] == ["session.scored", "session.closed"]


def test_a_topic_that_is_not_there_is_one_line(url, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--url", url, "topics", "tail", "none"])
    assert exit.value.code == 1 and "no topic none: there are polar.tasks" in capsys.readouterr().err


def test_topics_and_weights_are_tables(polar):
    out = polar("topics", "list")
    assert "polar.sessions" in out and "polar.dead-letters" in out
    assert "/models/base" in until(lambda: polar("weights"), "v0", "engine-1")


def test_tasks_are_submitted_listed_and_cancelled(polar, tmp_path):
    file, identity = tmp_path / "tasks.json", new_id()
    file.write_text(json.dumps([{"task_id": identity, "instruction": "do it", "evaluator": {"command": "true"}}]))
    assert polar("tasks", "submit", str(file)) == f"{identity}\n"
    assert polar("tasks", "submit", str(file)) == f"{identity}  (known already)\n"
    until(lambda: polar("tasks", "list"), identity, "do it")
    assert polar("tasks", "cancel", identity) == f"{identity} cancelled\n"
    assert polar("tasks", "cancel", identity) == f"{identity} was cancelled already\n"


def test_a_task_file_with_a_wrong_field_is_one_line(url, capsys, tmp_path):
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps({"instruction": "x", "evaluator": {"command": "true"}, "num_samples": 0}))
    with pytest.raises(SystemExit) as exit:
        main(["--url", url, "tasks", "submit", str(file)])
    assert exit.value.code == 1
    assert capsys.readouterr().err == "error: task.num_samples: expected int >= 1\n"
