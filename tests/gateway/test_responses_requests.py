"""Requests of the Responses API: input items, tools and options in chat shape, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway_app.dialects.dialect import BadRequest, ModelRequest
from gateway_app.dialects.openai_responses import OpenAIResponses
from gateway_app.dialects.responses_input import sealed

DIALECT = OpenAIResponses()
IMAGE = "data:image/png;base64,AA=="
FUNCTION = {"type": "function", "name": "read", "description": "reads", "parameters": {"type": "object"}}
SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "sub-agents", "tools": [SPAWN]}
ASKED = {"role": "user", "content": "hi"}


def parse(items: Any = "hi", **fields: Any) -> ModelRequest:
    return DIALECT.parse(json.dumps({"model": "policy", "input": items} | fields).encode())


def refused(items: Any = "hi", **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(items, **fields)
    return caught.value


def message(role: str, *texts: str, kind: str = "input_text", **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]} | fields


def said(text: str, **fields: Any) -> dict[str, Any]:
    return message("assistant", text, kind="output_text", **fields)


def called(call_id: str, name: str = "read", arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments} | fields


def output(call_id: str, content: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]} | fields


def call(call_id: str, name: str = "read", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_the_users_message_and_instructions_are_the_first_system_message() -> None:
    request = parse("hi", instructions="be brief", stream=True)
    assert request.messages == [{"role": "system", "content": "be brief"}, ASKED]
    assert request.streamed and request.model == "policy" and not parse().streamed


def test_messages_keep_their_order_and_a_developer_is_the_system() -> None:
    items = [message("developer", "a", "b"), message("user", "hi"), {"role": "system", "content": "c"}, said("yes")]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(items).messages == [
        {"role": "system", "content": two},
        ASKED,
        {"role": "system", "content": "c"},
        {"role": "assistant", "content": "yes"},
    ]


def test_an_image_passes_as_a_data_url() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    (found,) = parse([{"role": "user", "content": parts}]).messages
    assert found["content"] == [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": IMAGE}}]


def test_a_response_is_one_assistant_message_with_parallel_calls() -> None:
    items = [thought("hm"), said("I will"), called("1"), called("2", "write", '{"a": 1}'), output("1"), output("2")]
    assert parse([message("user", "hi"), *items]).messages == [
        ASKED,
        {
            "role": "assistant",
            "content": "I will",
            "reasoning_content": "hm",
            "tool_calls": [call("1"), call("2", "write", '{"a": 1}')],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
    ]


def test_calls_without_a_text_are_a_message_without_content() -> None:
    assert parse([called("1"), called("2")]).messages == [
        {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]}
    ]


@pytest.mark.parametrize("ids", [False, True])
def test_a_text_that_was_cut_and_the_one_sampled_after_it_stay_two_messages(ids: bool) -> None:
    items = [said("par"), said("partial")]
    if ids:
        items = [said("par", id="msg_a_0"), said("partial", id="msg_b_0")]
    assert [found["content"] for found in parse(items).messages] == ["par", "partial"]


def test_items_of_one_response_by_their_ids_are_one_message() -> None:
    items = [said("a", id="msg_x_0"), called("1", id="fc_x_1"), said("b", id="msg_x_2"), called("2", id="fc_x_3")]
    (found,) = parse(items).messages
    assert found["content"] == "ab" and [one["id"] for one in found["tool_calls"]] == ["1", "2"]
    assert len(parse([said("a", id="msg_x_0"), called("1", id="fc_y_0")]).messages) == 2


def test_sealed_reasoning_comes_back_whatever_else_a_program_sends_with_it() -> None:
    given = {"type": "reasoning", "summary": [], "encrypted_content": sealed("c1", "hm\n\né")}
    for item in (given, given | {"content": [{"type": "reasoning_text", "text": "other"}]}, given | {"content": None}):
        (found,) = parse([item, said("yes")]).messages
        assert found["reasoning_content"] == "hm\n\né"


@pytest.mark.parametrize("foreign", ["gAAAA", "é", "AA==", None])
def test_of_reasoning_that_is_sealed_by_another_its_text_is_taken(foreign: str | None) -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    (found,) = parse([{"type": "reasoning", "summary": summary, "encrypted_content": foreign}, said("yes")]).messages
    assert found["reasoning_content"] == "ab"


def test_reasoning_without_its_response_is_dropped() -> None:
    assert parse([thought("cut"), message("user", "hi")]).messages == [ASKED]
    cut = {"type": "reasoning", "encrypted_content": sealed("a", "cut")}
    (found,) = parse([cut, said("yes", id="msg_b_0")]).messages
    assert "reasoning_content" not in found
    again = {"type": "reasoning", "encrypted_content": sealed("b", "hm")}
    (found,) = parse([cut, again, said("yes")]).messages
    assert found["reasoning_content"] == "hm"


def test_an_output_of_parts_is_text_and_its_images_follow_all_outputs() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    shown = [*parts, {"type": "input_image", "image_url": IMAGE}]
    found = parse([called("1"), called("2"), output("1", shown), output("2"), message("user", "hi")]).messages[1:]
    assert found == [
        {"role": "tool", "tool_call_id": "1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
        ASKED,
    ]


def test_arguments_that_are_no_json_pass_as_they_are() -> None:
    (found,) = parse([called("1", arguments='{"cmd": oops')]).messages
    assert found["tool_calls"] == [call("1", arguments='{"cmd": oops')]


def test_tools_of_a_namespace_are_functions_of_their_own() -> None:
    request = parse([called("1", "spawn", namespace="agents")], tools=[NAMESPACE, FUNCTION])
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "agents__spawn", "description": "sub-agents", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}}},
    ]
    assert request.messages[0]["tool_calls"] == [call("1", "agents__spawn")]


def test_names_are_unique_and_a_history_without_tools_has_the_same_ones() -> None:
    taken = {"type": "function", "name": "agents__spawn"}
    request = parse([called("1", "spawn", namespace="agents")], tools=[NAMESPACE, taken])
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__spawn_2", "agents__spawn"]
    assert request.messages[0]["tool_calls"] == [call("1", "agents__spawn_2")]
    assert parse([called("1", "spawn", namespace="mcp__x__")]).messages[0]["tool_calls"] == [call("1", "mcp__x__spawn")]


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    history = [
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    ]
    tool = {"type": "custom", "name": "patch", "description": "patches", "format": grammar}
    request = parse(history, tools=[tool], tool_choice={"type": "custom", "name": "patch"})
    (function,) = [tool["function"] for tool in request.tools]
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert function["description"] == "patches\n\nThe input must match this grammar:\nstart: X"
    assert request.messages == [
        {"role": "assistant", "content": None, "tool_calls": [call("1", "patch", '{"input":"a \\"b\\""}')]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert request.options["tool_choice"] == {"type": "function", "function": {"name": "patch"}}


def test_tools_that_a_provider_runs_are_left_out() -> None:
    hosted = ["web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "local_shell"]
    request = parse(tools=[{"type": kind} for kind in hosted] + [FUNCTION], tool_choice="auto")
    assert [tool["function"]["name"] for tool in request.tools] == ["read"]
    assert refused(tools=[FUNCTION, {"type": "web_search"}], tool_choice={"type": "web_search"}).param == "tool_choice"
    assert refused(tools=[{"type": "web_search"}], tool_choice="required").param == "tool_choice"


def test_tool_choice() -> None:
    tools = [FUNCTION, NAMESPACE]
    for choice in ("auto", "none", "required"):
        assert parse(tools=tools, tool_choice=choice).options["tool_choice"] == choice
    named = parse(tools=tools, tool_choice={"type": "function", "name": "spawn", "namespace": "agents"})
    assert named.options["tool_choice"] == {"type": "function", "function": {"name": "agents__spawn"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    request = parse(tools=tools, tool_choice=allowed)
    assert request.options["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in request.tools] == ["read"]
    assert "tool_choice" not in parse(tool_choice="auto").options
    assert refused(tools=tools, tool_choice={"type": "function", "name": "other"}).param == "tool_choice"


def test_sampling_options() -> None:
    schema = {"type": "object"}
    request = parse(
        tools=[FUNCTION],
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        **{"store": False, "metadata": {}, "prompt_cache_key": "k", "client_metadata": {}, "service_tier": "auto"},
    )
    assert request.options == {
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert parse(text={"format": {"type": "text"}}, reasoning={"summary": "auto"}, top_logprobs=2).options == {}
    assert parse(text={"format": {"type": "json_object"}}).options == {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "auto"),
        ("context_management", [{"type": "compaction"}]),
        ("n", 2),
        ("max_output_tokens", 0),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == field and str(error).startswith(field)


@pytest.mark.parametrize("neutral", [{"previous_response_id": None}, {"background": False}, {"truncation": "disabled"}])
def test_what_asks_for_nothing_passes(neutral: dict[str, Any]) -> None:
    assert parse(**neutral).messages == [ASKED]


@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[0]"),
        ({"type": "local_shell_call", "call_id": "1", "action": {}}, "input[0]"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0]"),
        ({"type": "message", "role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].image_url"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]},
            "input[0].content[0].image_url",
        ),
        (called(""), "input[0].call_id"),
        (called("1", ""), "input[0].name"),
        ({"type": "function_call", "call_id": "1", "name": "read"}, "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "1"}, "input[0].output"),
        ({"role": "user", "content": 1}, "input[0].content"),
    ],
)
def test_an_item_that_cannot_be_served_is_named(item: dict[str, Any], where: str) -> None:
    assert refused([item]).param == where


@pytest.mark.parametrize("tool", [{"type": "function"}, {"type": "namespace", "tools": []}, {"name": "x"}, {}])
def test_a_tool_needs_its_type_and_name(tool: dict[str, Any]) -> None:
    assert str(refused(tools=[tool])).startswith("tools[0]")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"model":"m"}', b'{"model":"m","input":[]}', b"\xff"])
def test_no_request_at_all(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.parse(body)
