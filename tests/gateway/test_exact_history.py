"""Exact history: whatever a template does to the past, one conversation is one trace of the very ids that were sampled.

On the scripted engine, whose template has the habits of real ones, and real Kafka.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_stand import Stand, stand, story
from scripted_engine import Plan, ScriptedEngine, Template, by_turn
from scripted_engine.tokens import encode
from session_stories import ending, fold, opened

from polar.trajectories import assemble, whole_calls
from schemas.ids import new_id
from schemas.packed import unpack_ids, unpack_mask
from schemas.sessions import CallCompleted, CallStarted, SessionRecord
from schemas.traces import Trace

pytestmark = pytest.mark.kafka

OTHER_END = 0
"""<|endoftext|>"""
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
HABITS = {
    "none": Template(),
    "strips reasoning": Template(strip_reasoning=True),
    "writes arguments anew": Template(reserialise=True),
    "no-think glue": Template(no_think=True),
    "all": Template(strip_reasoning=True, reserialise=True, no_think=True),
}
TURNS = [
    Plan(reasoning="first I look", content="let me see", calls=[("bash", '{"b":  1, "a": [2 ,3]}')], drift=1),
    Plan(reasoning="then", calls=[("bash", '{"command":"ls"}'), ("bash", '{"command" : "pwd"}')], drift=2),
    Plan(reasoning="hm", content="which file?", drift=1),
    Plan(content="all done", drift=2),
]


def echoed(message: dict[str, Any], *, rewrites: bool) -> dict[str, Any]:
    """As a program sends a reply back: some parse the arguments and write them anew, and drop the reasoning."""
    if not rewrites:
        return message
    message = json.loads(json.dumps({key: value for key, value in message.items() if key != "reasoning_content"}))
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
    if message.get("content"):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


async def converse(gateway: Stand, session: str, *, rewrites: bool, streamed: bool = False) -> list[Any]:
    """Four turns, with tool results and a second question; the messages in the end."""
    messages: list[Any] = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}]
    for _ in TURNS:
        answer = await gateway.chat(gateway.base(session), messages=messages, tools=TOOLS, stream=streamed)
        message = answer.message()
        messages = [*messages, echoed(message, rewrites=rewrites)]
        calls = message.get("tool_calls", [])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a\nb"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "go on <|im_end|> now"})
    return messages


def traces(events: list[SessionRecord]) -> list[Trace]:
    session = events[0].session_id
    assembly = assemble(fold([opened(session), *events, *ending(session)], session))
    assert assembly.verdict.usable, assembly.verdict.reason
    return assembly.traces


def check_one_trace(events: list[SessionRecord], engine: ScriptedEngine) -> None:
    (trace,) = traces(events)
    last = engine.sampled[-1]
    assert [*unpack_ids(trace.prompt_ids).tolist(), *unpack_ids(trace.response_ids).tolist()] == [
        *last.prompt_ids,
        *last.ids,
    ]
    sampled = [token for one in engine.sampled for token in one.ids]
    trained = unpack_ids(trace.response_ids)[unpack_mask(trace.loss_mask) == 1]
    assert trained.tolist() == sampled


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("rewrites", [False, True], ids=["echoes", "rewrites"])
async def test_a_conversation_is_one_trace_of_the_ids_that_were_sampled(
    tmp_path: Path, kafka: str, habit: str, rewrites: bool
) -> None:
    session, engine = new_id(), ScriptedEngine(by_turn(*TURNS), template=HABITS[habit], thinks=True)
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        await converse(gateway, session, rewrites=rewrites, streamed=rewrites)
    events = await story(kafka, session)
    check_one_trace(events, engine)
    starts = [event for event in events if isinstance(event, CallStarted)]
    assert [start.history for start in starts] == ["template", "exact", "exact", "exact"]
    assert [start.history_note for start in starts] == [None] * 4
    assert [start.parent_call_id for start in starts] == [None, *(start.call_id for start in starts[:-1])]
    for number, (one, before) in enumerate(zip(engine.sampled[1:], engine.sampled[:-1], strict=True), 1):
        assert one.prompt_ids[: len(before.prompt_ids) + len(before.ids)] == [*before.prompt_ids, *before.ids]
        assert starts[number].kept_ids == len(before.prompt_ids) + len(before.ids)


async def test_without_habits_and_drift_exact_and_template_prompts_are_the_same(tmp_path: Path, kafka: str) -> None:
    plans = [Plan(content=text) for text in ("one", "two  ", "three\n", "four")]
    prompts: dict[str, list[list[int]]] = {}
    for history in ("exact", "template"):
        engine, session = ScriptedEngine(by_turn(*plans)), new_id()
        async with engine.serving(), stand(tmp_path, kafka, engine.url, history=history) as gateway:
            await converse(gateway, session, rewrites=False)
        prompts[history] = [one.prompt_ids for one in engine.sampled]
        assert len(traces(await story(kafka, session))) == 1
    assert prompts["exact"] == prompts["template"]


async def test_template_history_splits_where_the_template_rewrites(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(by_turn(*TURNS), template=HABITS["all"], thinks=True)
    async with engine.serving(), stand(tmp_path, kafka, engine.url, history="template") as gateway:
        await converse(gateway, session, rewrites=True)
    events = await story(kafka, session)
    split = traces(events)
    assert len(split) == 4 and all(trace.notes for trace in split[1:])
    assert {event.history for event in events if isinstance(event, CallStarted)} == {"template"}


async def test_chat_mode_records_the_whole_prompts_that_the_engine_told(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(by_turn(*TURNS), template=HABITS["writes arguments anew"])
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api="chat") as gateway:
        messages = await converse(gateway, session, rewrites=False, streamed=True)
    events = await story(kafka, session)
    calls = whole_calls(fold([opened(session), *events, *ending(session)], session))
    assert [call.prompt_ids.tolist() for call in calls] == [one.prompt_ids for one in engine.sampled]
    assert [call.response_ids.tolist() for call in calls] == [one.ids for one in engine.sampled]
    whole: dict[str | None, list[Any]] = {None: []}
    for event in events:
        if isinstance(event, CallStarted):
            whole[event.call_id] = [*whole[event.base_call_id][: event.kept_messages], *event.messages]
        elif isinstance(event, CallCompleted):
            assert whole[event.call_id] == messages[: len(whole[event.call_id])]
            whole[event.call_id].append(event.message)
    assert len(whole) == 5


async def test_a_reply_that_was_cut_off_is_ended_as_others_were(tmp_path: Path, kafka: str) -> None:
    plans = [Plan(content="first"), Plan(content="cut off he", finish="length"), Plan(content="then")]
    session, engine = new_id(), ScriptedEngine(by_turn(*plans))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        messages: list[Any] = []
        for text in ("one", "two", "three"):
            messages = [*messages, {"role": "user", "content": text}]
            messages.append((await gateway.chat(gateway.base(session), messages=messages)).message())
    first, cut, then = engine.sampled
    assert then.prompt_ids[: len(cut.prompt_ids) + len(cut.ids) + 1] == [*cut.prompt_ids, *cut.ids, first.ids[-1]]
    assert len(traces(await story(kafka, session))) == 1


async def test_why_a_prompt_is_the_templates_is_said(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="yes"))
    edited = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "never said"}]
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        await gateway.chat(base, messages=[*edited, {"role": "user", "content": "b"}])
        await gateway.chat(base, messages=edited[:1])
        served = [edited[0], {"role": "assistant", "content": "yes"}]
        await gateway.chat(base, messages=[*served, {"role": "user", "content": "b"}], tools=TOOLS)
        await gateway.chat(base, messages=[*served, {"role": "user", "content": "b"}])
    notes = [event.history_note for event in await story(kafka, session) if isinstance(event, CallStarted)]
    assert notes == ["unknown_history", None, "unknown_history", None]


async def test_after_a_restart_a_prompt_is_rendered_whole_and_says_so(tmp_path: Path, kafka: str) -> None:
    session, engine = new_id(), ScriptedEngine(Plan(content="yes"))
    messages = [{"role": "user", "content": "a"}]
    async with engine.serving():
        async with stand(tmp_path, kafka, engine.url) as gateway:
            messages.append((await gateway.chat(gateway.base(session), messages=messages)).message())
        async with stand(tmp_path, kafka, engine.url) as gateway:
            gateway.gateway.serving.resume({(session, 0): 1})
            messages.append({"role": "user", "content": "b"})
            await gateway.chat(gateway.base(session), messages=messages)
    first, second = [event for event in await story(kafka, session) if isinstance(event, CallStarted)]
    assert (second.number, second.history, second.history_note) == (1, "template", "history_not_in_memory")
    assert second.base_call_id is None and first.number == 0


async def two_turns(tmp_path: Path, kafka: str, engine: ScriptedEngine, **first: Any) -> list[CallStarted]:
    session, messages = new_id(), [{"role": "user", "content": "one"}]
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = gateway.base(session)
        messages.append((await gateway.chat(base, messages=messages, **first)).message())
        messages.append({"role": "user", "content": "two <|endoftext|> three"})
        await gateway.chat(base, messages=messages)
    return [event for event in await story(kafka, session) if isinstance(event, CallStarted)]


async def test_a_reply_that_ends_otherwise_than_the_templates_turns_is_rendered(tmp_path: Path, kafka: str) -> None:
    other = Plan(ids=(*encode("yes"), OTHER_END))
    engine = ScriptedEngine(by_turn(other, Plan(content="done")))
    _, second = await two_turns(tmp_path, kafka, engine, stop_token_ids=None)
    assert (second.history, second.history_note) == ("template", "template_ends_turns_otherwise")


async def test_a_stop_token_of_the_request_is_no_end_of_a_turn(tmp_path: Path, kafka: str) -> None:
    """The turn is ended in the next prompt, as after a reply that was cut off."""
    stop = encode("yes")[-1]
    engine = ScriptedEngine(by_turn(Plan(content="yes"), Plan(content="done")))
    _, second = await two_turns(tmp_path, kafka, engine, stop_token_ids=[stop])
    first, last = engine.sampled
    assert first.ids[-1] == stop
    assert (second.history, second.history_note) == ("template", "end_of_turn_unknown")
    assert last.prompt_ids == engine.prompt(
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": None},
         {"role": "user", "content": "two <|endoftext|> three"}]
    )  # fmt: skip
