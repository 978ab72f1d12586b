"""The answers of the store over a small run whose numbers are known."""

from __future__ import annotations

import pytest
from session_stories import call, completed, ending, failed, fold, opened, session, started
from store_records import REWARDS, TASK, loaded, positioned, prewarm, registered, run_of, slot, whole_run

from polar.store import Store, queries
from polar.trajectories import assemble
from schemas.scheduling import NodeLost, Run, SessionExited, SessionFinished, SessionReady, SessionRunning
from schemas.tasks import TaskCancelled


@pytest.fixture
def store(tmp_path):
    opened_store = Store(tmp_path / "polar.duckdb")
    yield opened_store
    opened_store.close()


@pytest.fixture
def whole(store):
    store.apply(positioned(whole_run()))
    return store


def put(store, topic, *records, start=0):
    store.apply([(topic, 0, start + i, record) for i, record in enumerate(records)])


def test_status_at_the_end_of_a_run(whole):
    status = queries.status(whole)
    assert status.sessions == {"usable": 2} and status.unusable == {}
    assert status.groups == {"batched": 1} and status.exclusions == {"no_variance": 1}
    assert (status.tasks, status.traces, status.last_batch) == (1, 2, 1)
    assert (status.version_published, status.versions_loaded) == (1, {"engine-1": 1})
    assert (status.probe_mean_difference, status.reward_mean) == (1e-5, 0.5)
    assert status.step is not None and status.step.metrics["loss"] == 0.5
    [node] = status.nodes
    assert (node.node_id, node.lost, node.run_slots, node.running, node.ready) == ("node-1", False, 3, 0, 0)
    assert node.heartbeat_at is not None


def test_status_of_an_empty_store(store):
    status = queries.status(store)
    assert (status.nodes, status.ready, status.sessions, status.step, status.version_published) == (
        [],
        0,
        {},
        None,
        None,
    )


def test_slots_follow_the_reports_stage_by_stage(store):
    put(store, "polar.scheduler", registered())
    seen = []
    for offset, record in enumerate(run_of("s"), start=1):
        put(store, "polar.scheduler", record, start=offset)
        node = queries.status(store).nodes[0]
        state = queries.sessions(store)[0].state
        seen.append((state, node.preparing, node.ready, node.running, node.postrun))
    assert seen == [
        ("preparing", 1, 0, 0, 0),
        ("ready", 0, 1, 0, 0),
        ("starting", 0, 1, 0, 0),
        ("running", 0, 0, 1, 0),
        ("postrun", 0, 0, 0, 1),
        ("finished", 0, 0, 0, 0),
    ]


@pytest.mark.parametrize("end", [NodeLost(node_id="node-1", incarnation="i1", reason="lease"), registered("i2")])
def test_a_lost_node_holds_no_slots_and_its_sessions_run_again(store, end):
    put(store, "polar.scheduler", registered(), *run_of("s")[:4], end)
    status = queries.status(store)
    assert (status.running, status.sessions) == (0, {"lost": 1})
    put(store, "polar.scheduler", prewarm("s", 1, "i9"), start=10)
    first, second = queries.sessions(store, voided=True)[::-1]
    assert (first.attempt, first.void, first.state) == (0, True, "lost")
    assert (second.attempt, second.void) == (1, False)
    assert [row.attempt for row in queries.sessions(store)] == [1]


def test_attempts_that_never_ran_have_the_state_of_their_end(store):
    put(store, "polar.scheduler", registered(), prewarm("a"), slot(SessionFinished, "a", outcome="infrastructure"))
    put(store, "polar.scheduler", prewarm("b"), slot(SessionFinished, "b", outcome="cancelled"), start=5)
    assert {row.session_id: row.state for row in queries.sessions(store)} == {"a": "infrastructure", "b": "cancelled"}


def test_verdicts_with_reasons_can_be_counted(store):
    stories = [session(f"s{n}", calls=0) for n in range(3)]
    put(store, "polar.sessions", *[record for story in stories for record in story])
    put(store, "polar.scheduler", *[assemble(fold(story, story[0].session_id)).verdict for story in stories])
    assert queries.status(store).unusable == {"the harness made no model call": 3}
    assert {row.state for row in queries.sessions(store)} == {"infrastructure"}


def test_sessions_are_found_by_state_and_task(whole):
    assert {row.session_id for row in queries.sessions(whole, state="usable", task_id="g")} == set(REWARDS)
    assert queries.sessions(whole, state="running") == [] and queries.sessions(whole, task_id="other") == []
    assert len(queries.sessions(whole, limit=1)) == 1


def test_the_story_of_a_session(whole):
    story = queries.session(whole, "s0")
    assert story is not None
    [attempt] = story.attempts
    assert (attempt.calls, attempt.sampled_tokens, attempt.traces, attempt.exit_code) == (3, 15, 1, 0)
    assert (attempt.reward, attempt.outcome, attempt.timed_out) == (1.0, "completed", False)
    assert [c.state for c in story.calls] == ["delivered"] * 3
    assert (story.calls[1].kept_ids, story.calls[1].new_prompt_tokens, story.calls[1].base_call_id) == (9, 4, "s0-0-c1")
    assert story.calls[0].versions == [{"version": 0, "start": 0, "end": 5}]
    assert story.calls[0].message == {"role": "assistant", "content": "reply 1"}
    assert [trace.trained_tokens for trace in story.traces] == [15]
    texts = [event.text for event in story.events]
    assert {"call 2 openai.chat 9+4 prompt tokens", "exit code 0 after 1.5 s", "command: reward 1.0"} <= set(texts)
    assert queries.session(whole, "unknown") is None


def test_the_state_of_a_call(store):
    put(
        store,
        "polar.sessions",
        opened("s"),
        started(1, [1]),
        started(2, [1]),
        completed(2, [2]),
        started(3, [1]),
        failed(3),
    )
    assert [(c.number, c.state, c.failure) for c in queries.calls(store, "s")] == [
        (1, "started", None),
        (2, "completed", None),
        (3, "failed", "engine_error"),
    ]
    assert queries.calls(store, "s", attempt=1) == []


def test_a_trace_comes_back_token_for_token(whole):
    record = whole_run()["polar.traces"][0]
    found = queries.trace(whole, record.trace_id)
    [row] = queries.traces(whole, session_id="s0")
    assert found is not None and found.trace == row and row.batch == 1
    assert [len(found.response_ids), sum(found.loss_mask), len(found.logprobs)] == [23, 15, 23]
    assert found.spans[0] == {"start": 0, "end": 5, "version": 0, "call_id": "s0-0-c1", "temperature": 1.0}
    assert queries.traces(whole, group_id="other") == []


def test_tasks_groups_batches_steps_and_weights(whole):
    [task] = queries.tasks(whole)
    assert (task.sessions, task.done, task.usable, task.reward_mean) == (2, 2, 2, 0.5)
    assert task.spec["instruction"] == TASK.instruction == task.instruction
    [group] = queries.groups(whole)
    assert (group.batch, group.excluded, group.sessions, group.usable, group.reward_mean) == (1, None, 2, 2, 0.5)
    assert [member["session_id"] for member in group.members] == ["s0", "s1"]
    [batch] = queries.batches(whole)
    assert (batch.batch, batch.groups, batch.sessions, batch.reward_mean) == (1, 1, 2, 0.5)
    assert [step.version for step in queries.steps(whole)] == [1]
    assert [(row.version, [load.engine_id for load in row.loads]) for row in queries.weights(whole)] == [
        (1, ["engine-1"]),
        (0, ["engine-1"]),
    ]
    assert [row.reason for row in queries.exclusions(whole)] == ["no_variance"]


def test_a_cancelled_task(whole):
    put(whole, "polar.tasks", TaskCancelled(task_id="g", reason="enough"), start=1)
    [task] = queries.tasks(whole, task_id="g")
    assert task.cancelled and task.cancel_reason == "enough" and queries.status(whole).cancelled_tasks == 1


def test_an_engine_that_loads_again_counts_by_its_last_load(whole):
    put(whole, "polar.weights", loaded(0, "engine-2"), loaded(1, "engine-2"), loaded(0, "engine-1"), start=10)
    assert queries.status(whole).versions_loaded == {"engine-1": 0, "engine-2": 1}


def scored(name, task, reward, version=0, *, purpose="eval", attempt=0, error=None):
    """A session of one call at one weight version, with its verdict."""
    call_id_parts = call(1, [1], [2], name, attempt)
    call_id_parts[1] = completed(1, [2], name, attempt, version=version)
    records = [opened(name, attempt, group=task, purpose=purpose), *call_id_parts]
    records += ending(name, attempt, reward=None if error else reward, error=error)
    return records, assemble(fold(records, name)).verdict


def test_pass_at_1_is_the_mean_over_tasks_of_scored_sessions(store):
    sessions = [
        *[scored("a0", "a", 1.0), scored("a1", "a", 0.0), scored("a2", "a", 0.0), scored("a3", "a", 0.0)],
        *[scored("b0", "b", 1.0), scored("b1", "b", 0.5)],
        scored("b2", "b", 1.0, error="evaluator crashed"),
        scored("c0", "c", 1.0, purpose="train"),
        scored("d0", "d", 1.0, version=3),
        scored("e0", "e", 1.0),
        scored("e0", "e", 0.0, attempt=1),
    ]
    put(store, "polar.sessions", *[record for records, _ in sessions for record in records])
    put(store, "polar.scheduler", *[verdict for _, verdict in sessions])
    result = queries.pass_at_1(store, "eval", last_version=0)
    assert [(t.task_id, t.sessions, t.passed) for t in result.by_task] == [("a", 4, 1), ("b", 2, 1), ("e", 1, 0)]
    assert (result.tasks, result.sessions, result.passed) == (3, 7, 2)
    assert result.pass_at_1 == pytest.approx((0.25 + 0.5 + 0.0) / 3)
    assert result.mean_reward == pytest.approx(2.5 / 7)
    assert queries.pass_at_1(store, "eval", first_version=1, last_version=3).pass_at_1 == 1.0
    assert queries.pass_at_1(store, "train").tasks == 1
    assert queries.pass_at_1(store, "eval", task_ids=["a"]).pass_at_1 == 0.25
    assert queries.pass_at_1(store, "eval", task_ids=["a"], pass_reward=0.0).pass_at_1 == 1.0
    assert queries.pass_at_1(store, "eval", first_version=9).pass_at_1 is None


def test_the_reports_that_make_a_stage_are_known():
    from polar.store.tables import STAGES

    assert list(STAGES) == [SessionReady, Run, SessionRunning, SessionExited, SessionFinished]
