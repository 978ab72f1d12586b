"""Records as readable lines."""

from datetime import UTC, datetime

import msgspec
import pytest

from polar.cli.story import RECORDS, line, read, said, short
from schemas.batches import BatchGroup, BatchSealed, SessionReward
from schemas.packed import pack_ids, pack_logprobs
from schemas.scheduling import NodeHeartbeat, Run, SessionAssembled
from schemas.sessions import (
    CallCompleted,
    CallDelivery,
    CallFailed,
    CallStarted,
    HarnessExited,
    Sampling,
    SessionClosed,
    SessionOpened,
    SessionScored,
    VersionSpan,
)
from schemas.tasks import EvaluatorSpec, TaskSpec, TaskSubmitted

AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
SESSION = "01890a5d-ac96-774b-bcce-b302099a8057"
EVENT = {"at": AT, "session_id": SESSION, "attempt": 2}
HEAD = "03:04:05.678  099a8057  #2  "


def completed(**changes) -> CallCompleted:
    fields = {
        "call_id": "c",
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "bash", "arguments": "ls"}}],
        },
        "response_ids": pack_ids([1, 2]),
        "logprobs": pack_logprobs([-0.5, -0.25]),
        "finish_reason": "tool_calls",
        "weight_versions": [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)],
    }
    return CallCompleted(**EVENT, **(fields | changes))


STARTED_BLIND = CallStarted(
    **EVENT,
    call_id="d",
    number=3,
    dialect="chat",
    model="policy",
    streamed=True,
    messages=[],
    tools=None,
    prompt_ids=None,
    sampling=Sampling(),
    history_note="unknown_history",
    auxiliary="codex.compaction",
)

STORY = [
    (
        SessionOpened(
            **EVENT,
            task_id="t",
            group_id="t",
            sample_index=3,
            policy="policy",
            purpose="train",
            harness="pi",
            builder="prefix_merging",
            node_id="node-1",
        ),
        "opened             pi on node-1, train task t, sample 3",
    ),
    (
        CallStarted(
            **EVENT,
            call_id="c",
            number=2,
            dialect="chat",
            model="policy",
            streamed=True,
            messages=[],
            tools=None,
            prompt_ids=pack_ids([1, 2, 3]),
            sampling=Sampling(),
            base_call_id="b",
            kept_ids=40,
        ),
        "call 2 started     3 prompt tokens after 40 known, streamed",
    ),
    (
        STARTED_BLIND,
        "call 3 started     prompt not told yet, template history: unknown_history, streamed, codex.compaction",
    ),
    (
        completed(prompt_ids=pack_ids([1, 2, 3]), base_call_id="b", kept_ids=40),
        "call completed     3 prompt tokens after 40 known, 2 tokens by v0, v1, mean log-prob -0.375, "
        "tool_calls: bash(ls)",
    ),
    (completed(), "call completed     2 tokens by v0, v1, mean log-prob -0.375, tool_calls: bash(ls)"),
    (CallDelivery(**EVENT, call_id="c", delivered=False), "call NOT delivered: the client had gone"),
    (
        CallFailed(**EVENT, call_id="c", reason="engine_error", infrastructure=True, detail="503"),
        "call FAILED        engine_error (infrastructure): 503",
    ),
    (HarnessExited(**EVENT, exit_code=0, timed_out=False, seconds=1.25), "agent exited       exit code 0, 1.2 s"),
    (
        HarnessExited(**EVENT, exit_code=None, timed_out=True, seconds=60.0),
        "agent exited       deadline reached, 60.0 s",
    ),
    (SessionScored(**EVENT, reward=1.0, evaluator="command"), "scored             reward 1 (command)"),
    (SessionScored(**EVENT, reward=None, evaluator="command", error="no bash"), "NOT scored         command: no bash"),
    (SessionClosed(**EVENT, outcome="completed"), "closed             completed"),
    (
        SessionAssembled(**EVENT, group_id="t", usable=True, infrastructure=False, reward=0.5, traces=1),
        "assembled          usable, 1 traces, reward 0.5",
    ),
    (Run(**EVENT, node_id="node-1", incarnation="i"), "command.run        on node-1"),
]


@pytest.mark.parametrize(("record", "text"), STORY, ids=[type(record).__name__ for record, _ in STORY])
def test_a_session_record_is_one_readable_line(record, text):
    assert line(record) == HEAD + text


def test_records_without_a_session_name_what_they_have():
    sealed = BatchSealed(
        at=AT,
        policy="policy",
        batch=7,
        traces=3,
        trained_tokens=90,
        groups=[BatchGroup(group_id="g", sessions=[SessionReward("s", 1.0)])],
        oldest_version=5,
        newest_version=6,
    )
    assert line(sealed).endswith("policy        batch 7 sealed: 1 groups, 3 traces, 90 tokens of v5…v6")
    beat = NodeHeartbeat(at=AT, node_id="node-1", incarnation="i", ready=4, running=2)
    assert line(beat).endswith("node-1        heartbeat          0 init, 4 ready, 2 run, 0 postrun")
    task = TaskSpec(instruction="Do\n it", evaluator=EvaluatorSpec(command="true"), task_id="t-1", num_samples=2)
    assert line(TaskSubmitted(at=AT, task=task)).endswith("submitted          t-1 train, 2 samples: Do it")


def test_every_record_of_every_topic_has_a_line_from_the_wire():
    for record, _ in STORY:
        topic = "polar.scheduler" if isinstance(record, SessionAssembled | Run) else "polar.sessions"
        wire = msgspec.json.encode({"topic": topic, "partition": 0, "offset": 1, "key": SESSION, "record": record})
        assert read(wire) == record


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(msgspec.ValidationError):
        read(b'{"topic": "polar.tasks", "partition": 0, "offset": 1, "key": null, "record": {"type": "else"}}')


def test_each_record_type_has_a_describer_of_its_own_or_a_tag():
    for union in RECORDS.values():
        for kind in getattr(union, "__args__", (union,)):
            assert isinstance(kind.__struct_config__.tag, str)


def test_short_forms():
    assert short(SESSION) == "099a8057"
    assert short("node-1") == "node-1"
    assert said({"content": "a  b\n" * 40}, width=10) == "a b a b a…"
    assert said({"content": [{"type": "text", "text": "look:"}, {"type": "image_url"}]}) == "look: (image_url)"
