"""The Chat Completions dialect: what passes, what is refused, and what its writer writes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway_app.dialects.chat_completions import PASSED, READ, REFUSED, OpenAIChat
from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Reply, ToolCall, ToolCallDelta, Usage

ASKED = [{"role": "user", "content": "hi"}]
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
READ_FILE = {"type": "function", "function": {"name": "read"}}
USAGE = Usage(prompt=7, completion=3, cached=4)
ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def parse(**fields: Any) -> ModelRequest:
    return OpenAIChat().parse(msgspec.json.encode({"model": "m", "messages": ASKED} | fields))


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        parse(**fields)
    return raised.value


def chunks(events: bytes) -> list[Any]:
    lines = events.split(b"\n\n")
    assert lines.pop() == b"" and all(line.startswith(b"data: ") for line in lines)
    return [line if line == b"data: [DONE]" else msgspec.json.decode(line[6:]) for line in lines]


def writer(**fields: Any) -> Any:
    return OpenAIChat().writer(parse(**fields), "c1")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff", None),
        (b'{"model":"\\ud800","messages":[]}', None),
        (b'{"a":' * 100_000, None),
        (b'{"model":"m","messages":[{"a":' + b"[" * 200 + b"]" * 200 + b"}]}", None),
        (b"[]", None),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":"x"}', "messages"),
        (b'{"model":"m","messages":[1]}', "messages[0]"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":[{}],"tools":{}}', "tools"),
        (b'{"model":"m","messages":[{}],"temperature":"hot"}', "temperature"),
        (b'{"model":"m","messages":[{}]}', "messages[0].role"),
    ],
)
def test_a_body_of_another_shape_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as raised:
        OpenAIChat().parse(body)
    assert raised.value.param == param and "\n" not in str(raised.value)


def test_messages_of_all_roles_pass_in_their_order() -> None:
    messages = [
        {"role": "system", "content": "be brief", "cache_control": {"type": "ephemeral"}},
        {"role": "developer", "content": [{"type": "text", "text": "very"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "not {json"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": "and?", "name": "ann"},
    ]
    passed = parse(messages=messages).messages
    assert passed[1] == messages[1] | {"role": "system"}
    assert passed[:1] + passed[2:] == messages[:1] + messages[2:]


def test_an_assistant_message_loses_its_nulls_and_other_names_for_reasoning() -> None:
    echoed = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "function_call": None}
    cleaned = {"role": "assistant", "content": "x"}
    assert parse(messages=[echoed]).messages == [cleaned]
    assert parse(messages=[echoed | {"reasoning": "r"}]).messages == [cleaned | {"reasoning_content": "r"}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "name": "f", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 3},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1", "image_url": "file:///etc/passwd"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,aGk="}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        {"role": "user", "content": [{"type": "prompt_embeds", "data": "x"}]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
        {"role": "assistant", "content": None, "tool_calls": 5},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "content": "x", "reasoning_content": ["r"]},
    ],
)
def test_a_message_that_the_engine_would_stumble_over_is_refused(message: dict[str, Any]) -> None:
    assert str(refused(messages=[*ASKED, message]).param).startswith("messages[1]")


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_break_capture_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    neutral, reason = REFUSED[name]
    assert refused(**{name: 2}).param == name and reason in str(refused(**{name: 2}))
    assert name not in parse(**{name: neutral}).options and name not in parse(**{name: None}).options


def test_fields_without_meaning_for_sampling_are_dropped() -> None:
    privileged = ["return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "request_id", "session_id"]
    hints = ["priority", "cache_salt", "stream_interval", "mm_payload", "metadata", "store", "user", "service_tier"]
    assert parse(**dict.fromkeys(privileged + hints, 1)).options == {}
    assert not set(privileged + hints) & (PASSED.keys() | READ.keys())


def test_sampling_parameters_pass() -> None:
    asked: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "logit_bias": {"5": -100.0},
        "min_tokens": 1,
        "stop_token_ids": [4],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert parse(**asked).options == asked
    assert parse(structured_outputs={"regex": "a+"}).options == {"structured_outputs": {"regex": "a+"}}


def test_other_names_of_the_engines_fields() -> None:
    assert parse(stop="x", max_tokens=5).options == {"stop": ["x"], "max_tokens": 5}
    assert parse(stop=["x", "y"], max_tokens=5, max_completion_tokens=6).options == {
        "stop": ["x", "y"],
        "max_tokens": 6,
    }
    guided = parse(guided_json={"type": "object"}, guided_whitespace_pattern=" ?").options
    assert guided == {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"}}
    assert parse(enable_thinking=False).options == {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"stop": ""},
        {"top_logprobs": -1, "logprobs": True},
        {"top_logprobs": 2},
        {"guided_regex": "a", "guided_json": "{}"},
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": "{}"}}]},
        {"tool_choice": "required"},
        {"tools": [BASH], "tool_choice": "any"},
        {"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"tools": [BASH], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}},
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).param


def test_tools_and_their_choice() -> None:
    named = {"type": "function", "function": {"name": "bash"}}
    assert parse(tools=[BASH]).tools == [BASH] and parse(tools=[BASH]).options == {}
    assert parse(tools=[]).tools == [] and parse(tool_choice="auto", parallel_tool_calls=True).options == {}
    for choice in ("none", "auto", "required", named):
        assert parse(tools=[BASH], tool_choice=choice).options == {"tool_choice": choice}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    narrowed = parse(tools=[READ_FILE, BASH], tool_choice=allowed)
    assert narrowed.tools == [BASH] and narrowed.options == {"tool_choice": "required"}


def test_a_stream_has_role_deltas_reason_usage_and_done() -> None:
    stream = writer(stream=True, stream_options={"include_usage": True})
    call = ToolCallDelta(index=0, id="t1", name="bash", arguments='{"a"')
    events = chunks(
        stream.keep_alive()
        + stream.start(7)
        + stream.delta(Delta(reasoning="hm", content="he"))
        + stream.delta(Delta())
        + stream.delta(Delta(content="y\u2028\u0085", logprobs=[ENTRY]))
        + stream.delta(Delta(tool_calls=(call, ToolCallDelta(index=0, arguments=":1}"))))
        + stream.end(Ended(finish_reason="stop", usage=USAGE))
    )
    assert events.pop() == b"data: [DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {(event["id"], event["model"]) for event in events} == {("chatcmpl-c1", "m")}
    assert events.pop(0)["choices"] == []
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "content": "he"},
        {"content": "y\u2028\u0085"},
        {
            "tool_calls": [
                {"index": 0, "id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"a"'}},
                {"index": 0, "function": {"arguments": ":1}"}},
            ]
        },
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]
    assert choices[2]["logprobs"] == {"content": [ENTRY], "refusal": None} and choices[1]["logprobs"] is None


def test_characters_that_end_lines_for_some_clients_are_escaped() -> None:
    line = writer().delta(Delta(content="a\u2028b\u2029c\u0085d\n\r\x0b\x0c\x1c"))
    assert len(line.decode().splitlines()) == 2
    assert chunks(line)[0]["choices"][0]["delta"]["content"] == "a\u2028b\u2029c\u0085d\n\r\x0b\x0c\x1c"


def test_usage_comes_in_a_stream_only_where_asked_for() -> None:
    assert b'"usage"' not in writer(stream=True).end(Ended(finish_reason="length", usage=USAGE))
    assert (
        chunks(writer().end(Ended(finish_reason="length", usage=USAGE)))[0]["choices"][0]["finish_reason"] == "length"
    )


def test_a_failed_stream_has_an_error_that_says_its_status_and_no_end() -> None:
    def error(status: int, code: str) -> Any:
        (found,) = chunks(writer(stream=True).failed(status, "away", code))
        return found["error"]

    assert error(503, "engine_unavailable") == {
        "message": "503 Service Unavailable: away",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }
    assert error(403, "session_ended")["message"] == "away"


def test_a_whole_body() -> None:
    call = ToolCall(id="t1", name="bash", arguments="not {json")
    reply = Reply(content=None, reasoning="hm", tool_calls=[call], logprobs=[ENTRY])
    body = msgspec.json.decode(writer().whole(reply, Ended(finish_reason="stop", usage=USAGE)))
    assert body["choices"] == [
        {
            "index": 0,
            "message": reply.message(),
            "logprobs": {"content": [ENTRY], "refusal": None},
            "finish_reason": "tool_calls",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body["object"] == "chat.completion" and body["id"] == "chatcmpl-c1" and body["model"] == "m"
    empty = msgspec.json.decode(writer().whole(Reply(), Ended(finish_reason="length", usage=USAGE)))
    assert empty["choices"][0]["message"] == {"role": "assistant", "content": ""}


def test_errors_have_openai_codes_where_programs_act_on_them() -> None:
    def error(status: int, message: str, code: str) -> Any:
        return msgspec.json.decode(OpenAIChat().error(status, message, code=code))["error"]

    overflow = error(400, "prompt is too long: 9000 tokens > 8192 maximum", "context_overflow")
    assert overflow["code"] == "context_length_exceeded" and overflow["type"] == "invalid_request_error"
    assert "maximum context length is 8192 tokens" in overflow["message"] and "9000" in overflow["message"]
    assert error(400, "too long", "context_overflow")["message"] == "too long"
    assert error(429, "wait", "too_many_calls")["code"] == "rate_limit_exceeded"
    assert error(403, "over", "session_ended") == {
        "message": "over",
        "type": "permission_error",
        "param": None,
        "code": "session_ended",
    }


def test_a_count() -> None:
    assert msgspec.json.decode(OpenAIChat().count(12))["input_tokens"] == 12
