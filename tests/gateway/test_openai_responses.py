"""Responses of the Responses API: events as OpenAI's own SDK reads them, whole bodies, failures, errors."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway_app.dialects.dialect import Delta, Ended, ModelRequest, Reply, ToolCall, ToolCallDelta, Usage
from gateway_app.dialects.openai_responses import OpenAIResponses
from gateway_app.dialects.reply import GrowingReply

DIALECT = OpenAIResponses()
TOOLS = [
    {"type": "function", "name": "read"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
]
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROB = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def request(**fields: Any) -> ModelRequest:
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", "tools": TOOLS} | fields).encode())


def ended(reason: Any = "stop") -> Ended:
    return Ended(finish_reason=reason, usage=Usage(prompt=100, completion=7, cached=64))


def piece(index: int, arguments: str = "", **fields: Any) -> Delta:
    return Delta(tool_calls=(ToolCallDelta(index=index, arguments=arguments, **fields),))


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event, which the SDK takes; ``event:`` lines and numbers are checked."""
    found: list[dict[str, Any]] = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}" and content["sequence_number"] == len(found)
        found.append(content)
    return found


def streamed(deltas: list[Delta], end: Ended | None = None, **fields: Any) -> list[dict[str, Any]]:
    writer = DIALECT.writer(request(**fields), "c1")
    return events(writer.start(100) + b"".join(map(writer.delta, deltas)) + writer.end(end or ended()))


def names(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


def test_the_full_order_of_events() -> None:
    deltas = [Delta(reasoning="h"), Delta(reasoning="m"), Delta(content="yes")]
    deltas += [piece(0, id="1", name="read"), piece(0, '{"a":'), piece(0, "1}"), piece(1, "{}", id="2", name="spawn")]
    found = streamed(deltas)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    reasoning = ["reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"]
    assert names(found) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", *reasoning, "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(call[0], call[1], call[1], *call[2:]),
        *call,
        "completed",
    ]
    assert [event["output_index"] for event in found if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    assert found[-1]["response"]["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 107,
    }
    ids = [item["id"] for item in found[-1]["response"]["output"]]
    assert ids == ["rs_c1_0", "msg_c1_1", "fc_c1_2", "fc_c1_3"] and found[0]["response"]["id"] == "resp_c1"


def test_the_sdk_reads_every_event_and_adds_the_items_up() -> None:
    deltas = [Delta(reasoning="hm"), Delta(content="a", logprobs=[LOGPROB]), Delta(content="b\u2028")]
    deltas += [piece(0, '{"input":', id="1", name="patch"), piece(0, '"x"}'), piece(1, "{}", id="2", name="read")]
    found = streamed(deltas, include=["message.output_text.logprobs"], temperature=1)
    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in found:
        state.handle_event(SDK_EVENT.validate_python(event))
    output = found[-1]["response"]["output"]
    assert Response.model_validate(found[-1]["response"]).output_text == "ab\u2028"
    assert output[1]["content"][0]["logprobs"] == [LOGPROB] and output[2]["input"] == "x"
    assert [one["logprobs"] for one in found if one["type"].endswith("text.delta") and "logprobs" in one] == [
        [LOGPROB],
        [],
    ]


def test_a_call_has_the_names_that_the_program_knows() -> None:
    deltas = [piece(0, "{}", id="1", name="agents__spawn"), piece(1, "{}", id="2", name="unknown")]
    first, second = streamed(deltas)[-1]["response"]["output"]
    assert (first["name"], first["namespace"], first["call_id"]) == ("spawn", "agents", "1")
    assert second["name"] == "unknown" and "namespace" not in second


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"input":"a\\nb"}', "a\nb"), ("*** patch", "*** patch"), ('{"input":1}', '{"input":1}')]
)
def test_a_custom_call_has_its_input(arguments: str, shown: str) -> None:
    (item,) = streamed([piece(0, arguments, id="1", name="patch")])[-1]["response"]["output"]
    assert item == {
        "id": "ctc_c1_0",
        "type": "custom_tool_call",
        "call_id": "1",
        "name": "patch",
        "input": shown,
        "status": "completed",
    }
    found = names(streamed([piece(0, arguments, id="1", name="patch")]))[2:-1]
    assert found == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]


def test_calls_whose_pieces_mix_come_one_after_the_other() -> None:
    deltas = [piece(0, '{"a":', id="1", name="read"), piece(1, '{"b":', id="2", name="read"), Delta(content="so")]
    deltas += [piece(1, "2}"), piece(0, "1}")]
    found = streamed(deltas)
    assert [item.get("arguments") for item in found[-1]["response"]["output"]] == ['{"a":1}', '{"b":2}', None]
    order = [event["output_index"] for event in found if "output_index" in event]
    assert order == sorted(order)


def test_a_response_of_nothing_but_reasoning_has_an_empty_text() -> None:
    for deltas in ([], [Delta(reasoning="hm")]):
        output = streamed(deltas)[-1]["response"]["output"]
        assert output[-1]["content"][0]["text"] == "" and len(output) == 1 + len(deltas)


@pytest.mark.parametrize(("reason", "told"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_a_response_that_was_cut_is_incomplete(reason: str, told: str) -> None:
    found = streamed([Delta(content="par")], ended(reason))
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": told}
    assert found[-1]["response"]["output"][-1]["status"] == "incomplete"
    whole = json.loads(DIALECT.writer(request(), "c1").whole(Reply(content="par"), ended(reason)))
    assert whole["status"] == "incomplete" and whole["output"] == found[-1]["response"]["output"]


def test_a_keep_alive_may_open_the_response() -> None:
    writer = DIALECT.writer(request(), "c1")
    stream = writer.keep_alive() + writer.keep_alive() + writer.start(5) + writer.delta(Delta(content="a"))
    stream += writer.keep_alive() + writer.end(ended())
    found = events(stream)
    assert names(found)[:4] == ["created", "in_progress", "in_progress", "output_item.added"]
    assert names(found).count("created") == 1 and names(found)[-1] == "completed"
    assert "in_progress" in names(found)[4:]


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (503, "engine_unavailable", "server_error"),
        (503, "kafka_unavailable", "server_error"),
        (429, "too_many_calls", "rate_limit_exceeded"),
        (403, "budget_spent", "invalid_prompt"),
        (400, "context_overflow", "context_length_exceeded"),
    ],
)
def test_a_failed_stream_says_whether_to_ask_again(status: int, code: str, told: str) -> None:
    writer = DIALECT.writer(request(), "c1")
    found = events(writer.failed(status, "no", code))
    assert names(found) == ["created", "in_progress", "failed"]
    assert found[-1]["response"]["error"] == {"code": told, "message": "no"}
    assert found[-1]["response"]["status"] == "failed"


def test_of_a_stream_that_fails_the_open_call_is_not_done() -> None:
    writer = DIALECT.writer(request(), "c1")
    stream = writer.start(1) + writer.delta(piece(0, "{}", id="1", name="read")) + writer.failed(503, "no", None)
    assert names(events(stream))[-2:] == ["function_call_arguments.delta", "failed"]


def test_a_whole_body_is_what_the_sdk_reads() -> None:
    calls = [ToolCall(id="1", name="agents__spawn", arguments="{}"), ToolCall(id="2", name="read", arguments="{oops")]
    reply = Reply(content="yes", reasoning="hm", tool_calls=calls)
    whole = DIALECT.writer(request(temperature=0.5), "c1").whole(reply, ended("tool_calls"))
    body = Response.model_validate_json(whole)
    assert (body.status, body.output_text, body.temperature) == ("completed", "yes", 0.5)
    assert [item.type for item in body.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(whole)["output"][3]["arguments"] == "{oops"


TEXT = st.text(st.characters(codec="utf-8"), max_size=9)
PIECES = st.builds(
    Delta,
    reasoning=st.just("") | TEXT,
    content=st.just("") | TEXT,
    tool_calls=st.lists(
        st.builds(
            ToolCallDelta,
            index=st.integers(0, 2),
            id=st.just("c"),
            name=st.sampled_from(["read", "patch", "agents__spawn"]),
            arguments=st.sampled_from(["{", "}", '"a":1', '{"a":1}', ""]) | TEXT,
        ),
        max_size=2,
    ).map(tuple),
)


@settings(deadline=None)
@given(deltas=st.lists(PIECES, max_size=6), data=st.data())
def test_deltas_in_any_order_give_items_in_order_that_the_sdk_reads(deltas: list[Delta], data: st.DataObject) -> None:
    writer = DIALECT.writer(request(), "c1")
    growing, stream = GrowingReply(), b""
    for delta in deltas:
        growing.add(delta)
        stream += (writer.keep_alive() if data.draw(st.booleans()) else b"") + (b"" if stream else writer.start(None))
        stream += writer.delta(delta)
    found = events((stream or writer.start(None)) + writer.end(ended()))
    output = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == output
    assert len({item["id"] for item in output}) == len(output)
    order = [event["output_index"] for event in found if "output_index" in event]
    assert order == sorted(order)
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert "".join(texts) == (growing.whole().content or "")
    for event in found[:: max(1, len(found) // 5)]:
        SDK_EVENT.validate_python(event)


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (400, "context_overflow", "invalid_request_error", "context_length_exceeded"),
        (401, "invalid_session_token", "authentication_error", "invalid_session_token"),
        (403, "budget_spent", "permission_error", "budget_spent"),
        (429, "too_many_calls", "rate_limit_error", "rate_limit_exceeded"),
        (503, "engine_unavailable", "server_error", "engine_unavailable"),
        (400, None, "invalid_request_error", None),
    ],
)
def test_errors_have_openais_shape(status: int, code: str | None, kind: str, told: str | None) -> None:
    error = msgspec.json.decode(DIALECT.error(status, "no", code=code, param="input"))
    assert error == {"error": {"message": "no", "type": kind, "param": "input", "code": told}}


def test_a_count_of_tokens() -> None:
    assert json.loads(DIALECT.count(7)) == {"object": "response.input_tokens", "input_tokens": 7}
