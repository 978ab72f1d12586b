"""Requests of the Messages dialect: meaning and order are kept, and nothing else than BadRequest is raised."""

import json
from typing import Any

import msgspec
import pytest
from anthropic_client import DIALECT, history, parse, refused, say
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.dialects.dialect import BadRequest

TOOL = {"name": "Write", "description": "Writes.", "input_schema": {"type": "object", "properties": {}}}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "aGk="}
PIXEL_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}

TEXT_BLOCKS = st.builds(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}, st.text())
IMAGES = st.just({"type": "image", "source": PIXEL})
USERS = st.lists(TEXT_BLOCKS | IMAGES, min_size=1, max_size=3).map(lambda content: {"role": "user", "content": content})
RESULTS = st.lists(st.text() | st.lists(TEXT_BLOCKS | IMAGES, max_size=3), min_size=1, max_size=3)


def chat_parts(blocks: list[Any]) -> list[Any]:
    return [PIXEL_PART if b["type"] == "image" else {"type": "text", "text": b["text"]} for b in blocks]


def as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@given(st.text(min_size=1), st.lists(USERS, max_size=3), st.text(), RESULTS, st.lists(TEXT_BLOCKS, max_size=2))
def test_a_request_keeps_its_meaning_and_its_order(
    system: str, users: list[Any], reminder: str, results: list[Any], after: list[Any]
) -> None:
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "Read", "input": {}} for n in range(len(results))]
    answers = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": r} for n, r in enumerate(results)]
    body = [
        *users,
        {"role": "system", "content": [{"type": "text", "text": reminder}]},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": answers + after},
    ]
    first, *rest = parse(body, system=system).messages
    assert first == {"role": "system", "content": system}
    assert [(m["role"], as_parts(m["content"])) for m in rest[: len(users)]] == [
        ("user", chat_parts(user["content"])) for user in users
    ]
    middle, asked, *told = rest[len(users) :]
    assert middle == {"role": "system", "content": reminder}
    assert [call["id"] for call in asked["tool_calls"]] == [call["id"] for call in calls]
    texts = [r if isinstance(r, str) else "\n".join(b["text"] for b in r if b["type"] == "text") for r in results]
    assert told[: len(texts)] == [
        {"role": "tool", "tool_call_id": f"t{n}", "content": text} for n, text in enumerate(texts)
    ]
    shown = [PIXEL_PART for r in results if not isinstance(r, str) for b in r if b["type"] == "image"]
    shown += chat_parts(after)
    assert [as_parts(m["content"]) for m in told[len(texts) :]] == ([shown] if shown else [])


NAMES = st.sampled_from(
    [
        "model",
        "messages",
        "role",
        "content",
        "type",
        "text",
        "source",
        "thinking",
        "signature",
        "id",
        "name",
        "input",
        "tool_use_id",
        "tools",
        "system",
        "max_tokens",
        "input_schema",
        "tool_choice",
        "stop_sequences",
        "temperature",
        "stream",
        "output_config",
        "format",
        "schema",
        "mcp_servers",
        "raw",
    ]
)
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "system",
        "text",
        "image",
        "tool_use",
        "tool_result",
        "thinking",
        "document",
        "base64",
        "url",
        "auto",
        "any",
        "tool",
        "none",
        "m",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=4)
BODIES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
BLOCKS = st.fixed_dictionaries(
    {"type": WORDS},
    optional={
        "text": BODIES,
        "content": BODIES,
        "source": BODIES,
        "input": BODIES,
        "id": WORDS,
        "name": WORDS,
        "tool_use_id": WORDS,
    },
)
NEARLY = st.fixed_dictionaries(
    {"model": WORDS, "messages": st.lists(st.fixed_dictionaries({"role": WORDS, "content": WORDS | st.lists(BLOCKS)}))},
    optional={"tools": BODIES, "system": BODIES, "tool_choice": BODIES, "output_config": BODIES, "thinking": BODIES},
)


def read_or_refused(content: bytes) -> None:
    try:
        request = DIALECT.parse(content)
    except BadRequest as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert isinstance(msgspec.json.encode(request.messages), bytes)


@given(st.binary() | BODIES.map(lambda body: json.dumps(body).encode()) | NEARLY.map(lambda b: json.dumps(b).encode()))
def test_whatever_comes_is_a_request_or_a_bad_request(content: bytes) -> None:
    read_or_refused(content)


NESTED = [
    b"%b",
    b'{"model":"m","messages":[],"unknown":%b}',
    b'{"model":"m","messages":[],"tools":[{"name":"a","input_schema":{"a":%b}}]}',
    b'{"model":"m","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":%b}]}]}',
]


@pytest.mark.parametrize("where", NESTED)
def test_deep_nesting_is_refused(where: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.parse(where % (b'{"a":' * 100_000 + b"1" + b"}" * 100_000))


@pytest.mark.parametrize("where", NESTED)
def test_nesting_near_the_limit_is_read_or_refused(where: bytes) -> None:
    for depth in range(850, 1000):
        read_or_refused(where % (b'{"a":' * depth + b"1" + b"}" * depth))


def test_a_count_needs_no_max_tokens() -> None:
    request = DIALECT.parse(json.dumps({"model": "m", "messages": [say()]}).encode())
    assert request.messages == [say()] and request.options == {}
    assert json.loads(DIALECT.count(12)) == {"input_tokens": 12}


def test_sampling_options() -> None:
    request = parse(
        [say()],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert request.streamed
    assert request.options == {
        "max_tokens": 100,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
    }


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        ({"type": "adaptive"}, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"type": "disabled"}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_thinking(thinking: dict[str, Any], options: dict[str, Any]) -> None:
    assert parse([say()], thinking=thinking).options == {"max_tokens": 100} | options


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "Write", "disable_parallel_tool_use": True},
            {"tool_choice": {"type": "function", "function": {"name": "Write"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice(choice: dict[str, Any], options: dict[str, Any]) -> None:
    request = parse([say()], tools=[TOOL | {"defer_loading": True, "cache_control": {}}], tool_choice=choice)
    assert request.options == {"max_tokens": 100} | options
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "Write", "description": "Writes.", "parameters": TOOL["input_schema"]},
        }
    ]


def test_a_tool_that_the_provider_runs_is_left_out_beside_others() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert parse([say()], tools=[search, TOOL]).tools == parse([say()], tools=[TOOL]).tools
    assert "web_search_20250305" in str(refused([say()], tools=[search]))
    refused([say()], tools=[search, TOOL], tool_choice={"type": "tool", "name": "web_search"})
    assert "bash_20250124" in str(refused([say()], tools=[{"type": "bash_20250124", "name": "bash"}, TOOL]))


def test_a_document_is_refused_by_name_and_place() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    error = refused([say(), {"role": "user", "content": [document]}])
    assert error.param == "messages[1].content[0]" and "document" in str(error)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    assert refused([{"role": "user", "content": [result]}]).param == "messages[0].content[0].content[0]"


def test_a_wrong_type_is_told_with_its_place() -> None:
    error = refused([{"role": "user", "content": 5}])
    assert error.param == "messages[0].content" and "messages[0].content" in str(error)


def test_system_messages_stay_where_they_stand() -> None:
    request = parse([say("a"), {"role": "system", "content": "b"}, say("c")], system=[{"type": "text", "text": "s"}])
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "s"),
        ("user", "a"),
        ("system", "b"),
        ("user", "c"),
    ]


def test_claude_codes_attribution_is_left_out() -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=abc;"}
    assert parse([say()], system=[line, {"type": "text", "text": "You are"}]).messages[0]["content"] == "You are"
    assert parse([say()], system=line["text"] + "\nYou are").messages[0]["content"] == "You are"
    assert parse([say()], system=[line]).messages == [say()]


def test_moving_cache_control_and_one_text_as_a_list_change_nothing() -> None:
    block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "new_field": [1]}
    assert parse([{"role": "user", "content": [block]}]).messages == parse([say("hello")]).messages


def test_thinking_comes_back_with_its_call() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I read."},
        {"type": "tool_use", "id": "t", "name": "Read", "input": {"a": 1}},
    ]
    assert history(content) == {
        "role": "assistant",
        "content": "I read.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "Read", "arguments": '{"a": 1}'}}],
    }


def test_an_error_without_a_word_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    assert parse([{"role": "user", "content": [result]}]).messages[0]["content"] == "Error"


def test_an_image_may_be_a_url_and_nothing_else() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    part = parse([{"role": "user", "content": [image]}]).messages[0]["content"][0]
    assert part == {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert refused([{"role": "user", "content": [stored]}]).param == "messages[0].content[0].source"


def test_a_request_that_ends_with_the_assistant_is_gone_on_with() -> None:
    options = parse([say(), {"role": "assistant", "content": "The answer is"}]).options
    assert options["continue_final_message"] is True and options["add_generation_prompt"] is False
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    assert "tool_result" in str(refused([say(), {"role": "assistant", "content": [call]}]))
    refused([say(), {"role": "assistant", "content": []}])


def test_what_the_url_says_counts() -> None:
    request = DIALECT.parse(json.dumps({"messages": [say()]}).encode(), model="named", streamed=True)
    assert request.model == "named" and request.streamed
    assert refused([say()], model=None).param == "model"


def test_text_around_a_call_is_one_text() -> None:
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    around = [{"type": "text", "text": "a"}, call, {"type": "text", "text": "b"}]
    assert history(around)["content"] == "ab"


@pytest.mark.parametrize("value", [b'{"a":"\xff"}', b'{"a":1e400}', b"[]", b"null", b'"text"'])
def test_an_input_that_is_no_object_of_json_is_refused(value: bytes) -> None:
    block = b'{"type":"tool_use","id":"t","name":"Read","input":%b}' % value
    with pytest.raises(BadRequest) as caught:
        DIALECT.parse(b'{"model":"m","messages":[{"role":"assistant","content":[%b]}]}' % block)
    assert caught.value.param == "messages[0].content[0].input"
