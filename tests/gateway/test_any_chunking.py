"""However the engine's stream is cut, the client reads the same text and the same sample is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_calls import ask, root
from gateway_stand import Stand, stand, story
from provider_clients import meaning
from scripted_engine import Plan, ScriptedEngine

from schemas.ids import new_id
from schemas.packed import unpack_ids, unpack_logprobs
from schemas.sessions import CallCompleted

pytestmark = pytest.mark.kafka

REPLIES: dict[str, dict[str, Any]] = {
    "unicode": {"content": "né 漢字 \u2028 👩‍👩‍👧 \U0001f600 end", "reasoning": "думаю 🤔"},
    "calls": {
        "content": "let me see",
        "calls": [("read", {"path": "a b", "n": [1, {"é": None}]}), ("write", '{"path":  "y"}')],
    },
    "invalid arguments": {"calls": [("write", '{"path": "a')]},
    "empty": {"content": ""},
    "one token": {"content": "a"},
    "drifting": {"content": "words that are sampled by other ids", "drift": 2},
    "cut off": {"content": "words that are cut o", "finish": "length"},
}
CHUNKS = [(1, 0.0), (2, 0.0), (7, 0.002), (1000, 0.0)]
DIALECTS = ["openai.chat", "anthropic.messages", "openai.responses", "google.generate"]


async def captured(kafka: str, gateway: Stand, dialect: str, *, streamed: bool) -> Any:
    """What the client's turn says, the sample, and its message."""
    session = new_id()
    got = await ask(gateway, root(gateway, session), dialect, streamed=streamed)
    (completed,) = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    ids, logprobs = unpack_ids(completed.response_ids), unpack_logprobs(completed.logprobs)
    told = without_ids(meaning(got.message())) if got.content and got.turn else None
    return told, ids.tolist(), logprobs.tolist(), without_ids(meaning(completed.message)), completed.finish_reason


def without_ids(said: Any) -> Any:
    content, reasoning, calls = said
    return content, reasoning, [call[1:] for call in calls]


@pytest.mark.parametrize("api", ["tokens", "chat"])
@pytest.mark.parametrize("name", REPLIES)
async def test_any_chunking_gives_the_same(tmp_path: Path, kafka: str, api: Any, name: str) -> None:
    engine = ScriptedEngine(thinks=True)
    found = []
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        for dialect in DIALECTS:
            for per_chunk, between_s in CHUNKS:
                plan = Plan(**REPLIES[name], per_chunk=per_chunk, between_s=between_s)
                engine.script = lambda turn, plan=plan: plan
                found.append(await captured(kafka, gateway, dialect, streamed=True))
            found.append(await captured(kafka, gateway, dialect, streamed=False))
    ids = engine.sampled[0].ids
    for told, *sample in found:
        assert told is None or told == sample[2]
        if name == "invalid arguments":
            assert sample[:2] == list(found[0][1:3]), "what its parser makes of them is the engine's business"
        else:
            assert tuple(sample) == found[0][1:]
    assert found[0][1] == ids and all(one.ids == ids for one in engine.sampled)
    assert np.array(found[0][2], dtype=np.float32).tolist() == engine.sampled[0].logprobs
    if name == "unicode":
        assert found[0][3][0].lstrip("\n") == REPLIES[name]["content"]


@pytest.mark.parametrize("api", ["tokens", "chat"])
@pytest.mark.parametrize("per_chunk", [5, 100_000])
async def test_a_huge_reply(tmp_path: Path, kafka: str, api: Any, per_chunk: int) -> None:
    plan = Plan(content="ab cd " * 10_000, per_chunk=per_chunk)
    session, engine = new_id(), ScriptedEngine(plan)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session), "openai.chat", streamed=True)
    assert got.text() == plan.content
    (completed,) = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
    assert len(engine.sampled[0].ids) == 20_001
    assert unpack_ids(completed.response_ids).tolist() == engine.sampled[0].ids
    assert completed.message["content"] == plan.content
