"""The admin API over a real broker and a real DuckDB file."""

import asyncio
import json
import re
import time

import pytest
from litestar.testing import TestClient

from gateway_app.admin import app as admin_app
from gateway_app.admin.app import create_app
from polar.settings import Settings, SettingsError
from polar.store import StoreError
from schemas.ids import new_id
from schemas.sessions import HarnessExited, SessionClosed, SessionOpened, SessionScored
from schemas.tasks import TaskCancelled, TaskSpec, TaskSubmitted
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import SESSIONS, TASKS, WEIGHTS

HERE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def settings(kafka, tmp_path_factory):
    return Settings(run_dir=tmp_path_factory.mktemp("run"), kafka_bootstrap=kafka)


@pytest.fixture(scope="module")
def client(settings):
    with TestClient(create_app(settings), base_url=HERE) as client:
        yield client


def task(**changes):
    return {"instruction": "say hi", "evaluator": {"command": "true"}, "task_id": new_id(), **changes}


def until(ask, condition, deadline_s=20.0):
    """Asks again until the recorder has caught up."""
    end = time.monotonic() + deadline_s
    while not condition(answer := ask()):
        assert time.monotonic() < end, answer
        time.sleep(0.02)
    return answer


def publish(bootstrap, topic, *records):
    async def send():
        async with Producer(bootstrap, source="test") as producer:
            for record in records:
                await producer.send(topic, record)

    asyncio.run(send())


def on_topic(bootstrap, topic):
    async def read():
        async with Reader(bootstrap, [topic], source="test", start="beginning") as reader:
            return [received.record for received in await reader.read_to_end()]

    return asyncio.run(read())


def story(session_id, reward=1.0):
    event = {"session_id": session_id, "attempt": 1}
    return [
        SessionOpened(
            **event,
            task_id="t",
            group_id="t",
            sample_index=0,
            policy="policy",
            purpose="train",
            harness="shell",
            builder="prefix_merging",
            node_id="node-1",
        ),
        HarnessExited(**event, exit_code=0, timed_out=False, seconds=0.5),
        SessionScored(**event, reward=reward, evaluator="command"),
        SessionClosed(**event, outcome="completed"),
    ]


def test_a_task_is_published_once_however_often_it_is_submitted(client, kafka):
    one, two = task(), task()
    first = client.post("/admin/tasks", json=[one, two])
    assert first.status_code == 201, first.text
    assert first.json() == {"task_ids": [one["task_id"], two["task_id"]], "new": [one["task_id"], two["task_id"]]}
    assert client.post("/admin/tasks", json=one).json() == {"task_ids": [one["task_id"]], "new": []}
    ids = [record.task.task_id for record in on_topic(kafka, TASKS) if isinstance(record, TaskSubmitted)]
    assert ids.count(one["task_id"]) == ids.count(two["task_id"]) == 1
    listed = until(
        lambda: client.get("/admin/tasks", params={"task_id": one["task_id"]}).json(), lambda rows: len(rows) == 1
    )
    assert listed[0]["instruction"] == "say hi"


def test_another_task_under_a_known_id_is_refused_and_nothing_of_the_request_is_published(client, kafka):
    known, fresh = task(), task()
    client.post("/admin/tasks", json=known)
    answer = client.post("/admin/tasks", json=[fresh, {**known, "instruction": "another"}])
    assert answer.status_code == 409
    assert known["task_id"] in answer.json()["detail"]
    assert fresh["task_id"] not in {getattr(record, "task", record).task_id for record in on_topic(kafka, TASKS)}


def test_a_wrong_field_is_named(client):
    answer = client.post("/admin/tasks", json=[task(), task(num_samples="many")])
    assert answer.status_code == 400
    assert answer.json()["detail"] == "tasks[1].num_samples: expected int, got str"


def test_cancelling_is_published_once(client, kafka):
    one = task()
    client.post("/admin/tasks", json=one)
    assert client.delete(f"/admin/tasks/{one['task_id']}").json() == {"task_id": one["task_id"], "new": True}
    assert client.delete(f"/admin/tasks/{one['task_id']}").json()["new"] is False
    cancelled = [record.task_id for record in on_topic(kafka, TASKS) if isinstance(record, TaskCancelled)]
    assert cancelled.count(one["task_id"]) == 1
    answer = client.delete("/admin/tasks/nobody")
    assert answer.status_code == 404 and "no task nobody" in answer.json()["detail"]
    until(
        lambda: client.get("/admin/tasks", params={"task_id": one["task_id"]}).json(),
        lambda rows: rows and rows[0]["cancelled"],
    )


def test_a_session_is_listed_and_its_story_is_whole(client, kafka):
    session = new_id()
    publish(kafka, SESSIONS, *story(session))
    told = until(
        lambda: client.get(f"/admin/sessions/{session}"),
        lambda answer: (
            answer.status_code == 200
            and answer.json()["attempts"][0]["reward"] == 1.0
            and answer.json()["events"][-1]["type"] == "session.closed"
        ),
    ).json()
    assert [event["type"] for event in told["events"]] == [
        "session.opened",
        "session.exited",
        "session.scored",
        "session.closed",
    ]
    assert told["attempts"][0]["harness"] == "shell"
    assert session in {row["session_id"] for row in client.get("/admin/sessions", params={"task_id": "t"}).json()}
    answer = client.get("/admin/sessions/nobody")
    assert answer.status_code == 404 and "no session nobody" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["tasks", "sessions", "groups", "traces", "batches", "exclusions", "weights"])
def test_each_list_answers_and_its_limit_is_checked(client, path):
    assert isinstance(client.get(f"/admin/{path}", params={"limit": 1}).json(), list)
    assert client.get(f"/admin/{path}", params={"limit": 0}).status_code == 400


def test_status_and_pass_at_1_answer(client):
    assert client.get("/admin/status").json()["tasks"] >= 0
    passed = client.get("/admin/pass-at-1", params={"purpose": "eval", "task_id": ["a", "b"]})
    assert passed.json()["sessions"] == 0


def test_topics_tell_how_far_they_are(client, kafka):
    publish(kafka, SESSIONS, *story(new_id()))
    topics = {row["topic"]: row for row in client.get("/admin/topics").json()}
    assert sum(partition["end"] for partition in topics[SESSIONS]["partitions"]) >= 4
    assert set(topics) >= {TASKS, SESSIONS, WEIGHTS}


def test_a_tail_gives_the_last_records_and_those_of_one_session(client, kafka):
    one, other = new_id(), new_id()
    publish(kafka, SESSIONS, *story(one), *story(other))
    lines = client.get(f"/admin/topics/{SESSIONS}/tail", params={"limit": 3}).text.splitlines()
    assert [json.loads(line)["record"]["type"] for line in lines] == [
        "session.exited",
        "session.scored",
        "session.closed",
    ]
    for identity in (one, one[:-1], one[-12:]):
        lines = client.get(f"/admin/topics/{SESSIONS}/tail", params={"session": identity}).text.splitlines()
        assert [json.loads(line)["record"]["session_id"] for line in lines] == [one] * 4
    assert client.get("/admin/topics/none/tail").status_code == 404


def test_what_was_submitted_is_known_after_a_restart(kafka, tmp_path):
    settings, one = Settings(run_dir=tmp_path, kafka_bootstrap=kafka), task()
    for known in (False, True):
        with TestClient(create_app(settings), base_url=HERE) as client:
            assert client.post("/admin/tasks", json=one).json()["new"] == ([] if known else [one["task_id"]])


def test_with_a_key_only_its_holder_gets_in(kafka, tmp_path):
    settings = Settings(run_dir=tmp_path, kafka_bootstrap=kafka, admin_key="s3cret", admin_host="0.0.0.0")
    with TestClient(create_app(settings), base_url="http://polar.example") as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Admin-Key": ""}, {"Authorization": "Basic s3cret"}):
            answer = client.get("/admin/status", headers=headers)
            assert answer.status_code == 401 and "admin key" in answer.json()["detail"]
        for headers in ({"Authorization": "Bearer s3cret"}, {"X-Admin-Key": "s3cret"}):
            assert client.get("/admin/status", headers=headers).status_code == 200


def test_without_a_key_no_foreign_page_gets_in(client):
    assert client.get("/admin/status", headers={"Host": "localhost:8090"}).status_code == 200
    assert client.get("/admin/status", headers={"Host": "rebound.example"}).status_code == 403
    assert client.get("/admin/status", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.get("/admin/status", headers={"Origin": "http://localhost:3000"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "polar.example"])
def test_beyond_loopback_it_refuses_to_start_without_a_key(host):
    with pytest.raises(SettingsError, match="set POLAR_ADMIN_KEY"):
        create_app(Settings(admin_host=host))
    create_app(Settings(admin_host=host, admin_key="k"))


def test_openapi_describes_every_route(client):
    paths = client.get("/schema/openapi.json").json()["paths"]
    assert {"/health", "/admin/tasks", "/admin/sessions/{session_id}", "/admin/topics/{topic}/tail"} <= set(paths)


def test_openapi_describes_the_tasks_that_are_submitted(client):
    description = client.get("/schema/openapi.json").json()
    body = description["paths"]["/admin/tasks"]["post"]["requestBody"]
    one = {"$ref": "#/components/schemas/TaskSpec"}
    assert body["required"]
    shapes = body["content"]["application/json"]["schema"]["anyOf"]
    assert len(shapes) == 2 and one in shapes and {"type": "array", "items": one} in shapes
    schemas = description["components"]["schemas"]
    assert sorted(schemas["TaskSpec"]["required"]) == ["evaluator", "instruction"]
    assert set(schemas["TaskSpec"]["properties"]) == set(TaskSpec.__struct_fields__)
    assert schemas["SamplingSpec"]["properties"]["top_p"]["anyOf"][0]["maximum"] == 1
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)))
    assert named <= set(schemas)


def test_a_dead_recorder_is_told_and_the_app_is_no_longer_healthy(kafka, tmp_path, monkeypatch):
    told = []

    async def broken(store, bootstrap, stop):
        raise StoreError("the disk is full")

    monkeypatch.setattr(admin_app, "record", broken)
    settings = Settings(run_dir=tmp_path, kafka_bootstrap=kafka)
    with TestClient(create_app(settings, told.append), base_url=HERE) as client:
        answer = until(lambda: client.get("/health"), lambda answer: answer.status_code == 503)
    assert "recorder has stopped" in answer.json()["status"]
    assert [str(error) for error in told] == ["the disk is full"]
