"""What a task fixes is what the engine is asked and what the record says; stop strings never reach a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialect_calls import ask, root
from gateway_stand import stand, story
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Plan, ScriptedEngine

from gateway_app.dialects.dialect import Delta, ToolCallDelta
from gateway_app.sampling.stop_cut import StopCut
from schemas.ids import new_id
from schemas.packed import unpack_ids
from schemas.sessions import CallCompleted, CallStarted
from schemas.tasks import SamplingSpec

pytestmark = pytest.mark.kafka

SCHEMA = {"json": {"type": "object"}}
SAMPLINGS = {
    "temperature": SamplingSpec(temperature=0.75),
    "cuts": SamplingSpec(top_p=0.5, top_k=7, min_p=0.25),
    "ends": SamplingSpec(max_tokens=6, stop=["END"]),
    "structured": SamplingSpec(structured_outputs=SCHEMA),
    "all": SamplingSpec(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=9, stop=["END"], structured_outputs=SCHEMA
    ),
}
DIALECTS = ["openai.chat", "anthropic.messages", "openai.responses", "google.generate"]


@pytest.mark.parametrize("api", ["tokens", "chat"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_what_is_fixed_is_what_the_engine_is_asked_and_what_is_recorded(
    tmp_path: Path, kafka: str, api: Any, dialect: str, name: str
) -> None:
    session, engine, fixed = new_id(), ScriptedEngine(Plan(content="words " * 30)), SAMPLINGS[name]
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        got = await ask(gateway, root(gateway, session, sampling=fixed), dialect, streamed=True)
    assert got.turn is not None
    asked = engine.bodies("generate")[0]["sampling_params"] if api == "tokens" else engine.bodies("chat")[0]
    started = next(event for event in await story(kafka, session) if isinstance(event, CallStarted))
    for field in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(fixed, field)
        if value is not None:
            assert asked.get(field, 0) == getattr(started.sampling, field) == value
    if fixed.max_tokens:
        assert asked["max_tokens"] == started.sampling.max_tokens == fixed.max_tokens
        assert len(engine.sampled[0].ids) == fixed.max_tokens
    if fixed.stop:
        assert asked["stop"][0] == started.sampling.stop[0] == "END"
    if fixed.structured_outputs:
        assert asked["structured_outputs"]["json"] == SCHEMA["json"]
        assert "structured_outputs" in started.sampling.altered and started.sampling.reshapes


@pytest.mark.parametrize("api", ["tokens", "chat"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("per_chunk", [1, 4])
async def test_a_stop_string_at_any_place_is_cut_off_to_the_letter(
    tmp_path: Path, kafka: str, api: Any, streamed: bool, per_chunk: int
) -> None:
    texts = ["", "a", "ab", "abc", "abcd", "ST", "STO", "SSTO", "SSTSTO", "é", "a longer one before it\n"]
    engine = ScriptedEngine()
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        for before in texts:
            session, plan = new_id(), Plan(content=f"{before}STOP and more", per_chunk=per_chunk)
            engine.script = lambda turn, plan=plan: plan
            base = root(gateway, session, sampling=SamplingSpec(stop=["never", "STOP"]))
            got = await ask(gateway, base, "openai.chat", streamed=streamed)
            assert got.text() == before
            (completed,) = [event for event in await story(kafka, session) if isinstance(event, CallCompleted)]
            assert (completed.finish_reason, completed.stop_reason) == ("stop", "STOP")
            assert (completed.message["content"] or "") == before
            assert unpack_ids(completed.response_ids).tolist() == engine.sampled[-1].ids


STOPS = st.lists(st.text("abS", min_size=1, max_size=4), max_size=3)


@given(st.data(), st.text("abSéx", max_size=30), STOPS, st.sampled_from(["content", "reasoning"]))
def test_no_letter_of_a_stop_string_is_shown_and_none_before_it_is_lost(
    data: st.DataObject, text: str, stops: list[str], field: str
) -> None:
    cut, shown, said, reason = StopCut(stops), "", "", None
    while said != text and reason is None:
        piece = text[len(said) : len(said) + data.draw(st.integers(1, 6))]
        said += piece
        reason = next((stop for stop in stops if stop in said), None)
        part = cut.take(Delta(**{field: piece}))  # type: ignore[arg-type]
        shown += getattr(part, field) if part else ""
        assert not any(stop in shown for stop in stops)
        ends = max(map(len, stops), default=1) - 1
        assert reason is not None or len(said) - len(shown) <= ends, "no more is held back than a stop string may need"
    rest = cut.rest(reason)
    shown += getattr(rest, field) if rest else ""
    assert shown == (said.partition(reason)[0] if reason else text)


def test_what_is_held_back_comes_before_what_follows_it() -> None:
    cut = StopCut(["never said"])
    call = ToolCallDelta(index=0, id="1", name="write", arguments="{}")
    pieces = [Delta(reasoning="a thought"), Delta(content="the words"), Delta(tool_calls=(call,))]
    shown = [piece for piece in map(cut.take, pieces) if piece]
    assert [(piece.reasoning, piece.content, piece.tool_calls) for piece in shown] == [
        ("a thought", "", ()),
        ("", "the words", (call,)),
    ]
    assert cut.rest(None) is None
