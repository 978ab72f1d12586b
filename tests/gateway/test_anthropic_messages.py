"""Responses of the Messages dialect, whole and streamed: a program that sends them back sends what was sampled."""

import json
from typing import Any

import msgspec
import pytest
from anthropic_client import DIALECT, REQUEST, assembled, ended, events, history, meaning, streamed
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.dialects.anthropic_request import UNPARSED
from gateway_app.dialects.dialect import Delta, Reply, ToolCall, ToolCallDelta
from gateway_app.dialects.reply import GrowingReply

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)
ARGUMENTS = (
    st.builds(lambda value, indent: json.dumps(value, indent=indent), OBJECTS, st.sampled_from([None, 2]))
    | st.builds(lambda value: json.dumps(value, ensure_ascii=False), OBJECTS)
    | JSON.map(json.dumps)
    | st.text()
    | st.sampled_from(["", " ", '{"a": "b', '{"a": 1}}', '{"__unparsedToolInput": {"raw": "x", "len": 1}}'])
)
CALLS = st.lists(st.tuples(st.sampled_from(["Bash", "Write"]), ARGUMENTS), max_size=3).map(
    lambda calls: [ToolCall(id=f"toolu_{n}", name=name, arguments=text) for n, (name, text) in enumerate(calls)]
)
REPLIES = st.builds(Reply, content=st.none() | st.text(), reasoning=st.none() | st.text(min_size=1), tool_calls=CALLS)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def chunks(draw: st.DrawFn, reply: Reply) -> list[Delta]:
    """The reply in deltas, cut anywhere; what stands beside each other may share a delta."""
    deltas = [Delta(reasoning=text) for text in draw(pieces(reply.reasoning or ""))]
    deltas += [Delta(content=text) for text in draw(pieces(reply.content or ""))]
    for n, call in enumerate(reply.tool_calls):
        first, *rest = draw(pieces(call.arguments))
        deltas.append(Delta(tool_calls=(ToolCallDelta(index=n, id=call.id, name=call.name, arguments=first),)))
        deltas += [Delta(tool_calls=(ToolCallDelta(index=n, arguments=text),)) for text in rest]
    shared: list[Delta] = []
    for delta in deltas:
        before = shared[-1] if shared else None
        if before and fits(before, delta) and draw(st.booleans()):
            shared[-1] = Delta(
                reasoning=before.reasoning + delta.reasoning,
                content=before.content + delta.content,
                tool_calls=before.tool_calls + delta.tool_calls,
            )
        else:
            shared.append(delta)
    return shared


def fits(before: Delta, delta: Delta) -> bool:
    return not (delta.reasoning and (before.content or before.tool_calls)) and not (delta.content and before.tool_calls)


@given(REPLIES, st.sampled_from(["stop", "tool_calls", "length"]))
def test_a_whole_reply_comes_back_as_the_same_message(reply: Reply, reason: Any) -> None:
    whole = json.loads(DIALECT.writer(REQUEST, "c1").whole(reply, ended(reason)))
    assert meaning(history(whole["content"])) == meaning(reply.message())


@given(st.data(), REPLIES, st.sampled_from(["stop", "tool_calls", "length"]))
def test_any_chunking_gives_the_same_content(data: st.DataObject, reply: Reply, reason: Any) -> None:
    deltas = data.draw(chunks(reply))
    message = assembled(streamed(deltas, ended(reason)))
    whole = json.loads(DIALECT.writer(REQUEST, "c1").whole(reply, ended(reason)))
    assert meaning(history(message["content"])) == meaning(reply.message())
    assert [block["type"] for block in message["content"]] == [block["type"] for block in whole["content"]]
    assert {**message, "content": []} == {**whole, "content": []}


@given(st.data(), st.lists(ARGUMENTS.filter(lambda text: text.count("}") < 2), min_size=2, max_size=3))
def test_calls_that_grow_in_turn_lose_nothing(data: st.DataObject, arguments: list[str]) -> None:
    growing = [ToolCallDelta(index=n, id=f"toolu_{n}", name="Bash") for n in range(len(arguments))]
    rest = [ToolCallDelta(index=n, arguments=c) for n, text in enumerate(arguments) for c in data.draw(pieces(text))]
    order = data.draw(st.permutations(range(len(rest))))
    turns = {n: iter([piece for piece in rest if piece.index == n]) for n in range(len(arguments))}
    deltas = [Delta(tool_calls=(piece,)) for piece in growing]
    deltas += [Delta(tool_calls=(next(turns[rest[k].index]),)) for k in order]
    whole = GrowingReply()
    for delta in deltas:
        whole.add(delta)
    content = assembled(streamed(deltas, ended()))["content"]
    assert meaning(history(content)) == meaning(whole.whole().message())


def test_the_events_stand_in_the_order_of_the_provider() -> None:
    call = ToolCallDelta(index=0, id="toolu_1", name="Write", arguments='{"a":')
    deltas = [
        Delta(reasoning="hm", content="I write."),
        Delta(tool_calls=(call, ToolCallDelta(index=0, arguments="1}"))),
        Delta(tool_calls=(ToolCallDelta(index=1, id="toolu_2", name="Write", arguments="{}"),)),
    ]
    found = events(streamed(deltas, ended("tool_calls")))
    assert [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in found] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert found[9]["content_block"] == {"type": "tool_use", "id": "toolu_1", "name": "Write", "input": {}}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_usage_tells_what_was_cached_apart() -> None:
    start, *_, end, _ = events(streamed([Delta(content="x")], ended()))
    assert start["message"]["usage"]["input_tokens"] == 100
    assert end["usage"] == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 7,
    }
    unknown = events(DIALECT.writer(REQUEST, "c1").start(None))[0]
    assert unknown["message"]["usage"]["input_tokens"] == 0


def test_a_keep_alive_is_a_ping_anywhere_and_a_piece_of_what_is_open() -> None:
    writer = DIALECT.writer(REQUEST, "c1")
    assert events(writer.keep_alive()) == [{"type": "ping"}]
    stream = writer.start(5) + writer.keep_alive() + writer.delta(Delta(reasoning="hm"))
    thinking = events(alive := writer.keep_alive())
    stream += alive + writer.delta(Delta(content="a"))
    text = events(alive := writer.keep_alive())
    stream += alive + writer.delta(Delta(content="b")) + writer.end(ended())
    assert thinking[1]["delta"] == {"type": "thinking_delta", "thinking": ""} and thinking[1]["index"] == 0
    assert text[1]["delta"] == {"type": "text_delta", "text": ""} and text[1]["index"] == 1
    assert assembled(stream)["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "c1"},
        {"type": "text", "text": "ab"},
    ]


@pytest.mark.parametrize(
    ("reason", "sequence", "arguments", "told"),
    [
        ("stop", None, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("length", None, None, ("max_tokens", None)),
        ("length", None, '{"a', ("max_tokens", None)),
        ("content_filter", None, None, ("refusal", None)),
        ("tool_calls", None, "{}", ("tool_use", None)),
        ("stop", None, "{}", ("tool_use", None)),
        ("stop", "END", "{}", ("tool_use", None)),
        ("stop", "END", '{"a', ("stop_sequence", "END")),
        ("tool_calls", None, "not json", ("tool_use", None)),
    ],
)
def test_the_stop_reason(reason: str, sequence: str | None, arguments: str | None, told: tuple[str, Any]) -> None:
    calls = [] if arguments is None else [ToolCall(id="t", name="Bash", arguments=arguments)]
    reply, end = Reply(content="x", tool_calls=calls), ended(reason, sequence)
    pieces = [ToolCallDelta(index=0, id=c.id, name=c.name, arguments=c.arguments) for c in calls]
    whole = json.loads(DIALECT.writer(REQUEST, "c1").whole(reply, end))
    message = assembled(streamed([Delta(content="x", tool_calls=tuple(pieces))], end))
    assert (whole["stop_reason"], whole["stop_sequence"]) == told
    assert (message["stop_reason"], message["stop_sequence"]) == told


def test_arguments_that_are_no_object_are_wrapped_and_unwrapped() -> None:
    raw = '{"command": "echo \U0001f600'
    reply = Reply(tool_calls=[ToolCall(id="t", name="Bash", arguments=raw)])
    content = json.loads(DIALECT.writer(REQUEST, "c1").whole(reply, ended()))["content"]
    assert content[0]["input"] == {UNPARSED: {"raw": raw, "len": len(raw) + 1}}
    assert history(content)["tool_calls"][0]["function"]["arguments"] == raw


def test_sampled_arguments_keep_their_spelling() -> None:
    raw = '{"b" : 1.0,\n "a":12345678901234567890123}'
    reply = Reply(tool_calls=[ToolCall(id="t", name="Bash", arguments=raw)])
    whole = DIALECT.writer(REQUEST, "c1").whole(reply, ended())
    assert raw.encode() in whole
    content = msgspec.json.decode(whole, type=dict[str, msgspec.Raw])["content"]
    body = b'{"model":"m","messages":[{"role":"assistant","content":%b},{"role":"user","content":"on"}]}'
    sent_back = DIALECT.parse(body % bytes(content)).messages[0]
    assert sent_back["tool_calls"][0]["function"]["arguments"] == raw


def test_an_empty_reply_is_one_empty_text() -> None:
    assert json.loads(DIALECT.writer(REQUEST, "c1").whole(Reply(), ended()))["content"] == [
        {"type": "text", "text": ""}
    ]
    assert assembled(streamed([], ended()))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_provider_s_type(status: int, kind: str) -> None:
    told = {"type": "error", "error": {"type": kind, "message": "why"}}
    assert json.loads(DIALECT.error(status, "why", code="any")) == told
    assert events(DIALECT.writer(REQUEST, "c1").failed(status, "why", None)) == [told]


@pytest.mark.parametrize("message", ["prompt is too long: 9000 tokens > 8192 maximum", "9000 tokens do not fit"])
def test_a_prompt_that_is_too_long_is_known_by_its_beginning(message: str) -> None:
    error = json.loads(DIALECT.error(400, message, code="context_overflow"))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 9000") and error["message"].count("too long") == 1
