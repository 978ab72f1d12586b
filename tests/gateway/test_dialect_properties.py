"""What holds for every dialect: a program sends back what was sampled, and no body breaks a parser."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from provider_clients import CLIENTS, NAMES, Client, meaning

from gateway_app.dialects import DIALECTS
from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Reply, ToolCall, ToolCallDelta, Usage
from gateway_app.dialects.reply import GrowingReply
from gateway_app.dialects.wire import DEEPEST, deeper

CODES = ("context_overflow", "engine_unavailable", "session_ended", "too_many_calls", "budget_spent", "request_refused")
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
ARGUMENTS = (
    st.builds(json.dumps, st.dictionaries(TEXT, JSON, max_size=3), indent=st.sampled_from([None, 2]))
    | JSON.map(json.dumps)
    | TEXT
    | st.sampled_from(["{", '{"path": "a', '{"a":1}}', " ", "[]", '{"path":"a"} and'])
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3).map(
    lambda pairs: [ToolCall(id=f"call-{n}", name=name, arguments=text) for n, (name, text) in enumerate(pairs)]
)
REPLIES = st.builds(Reply, content=st.none() | TEXT, reasoning=st.none() | TEXT.filter(bool), tool_calls=CALLS)
ENDS = st.builds(
    Ended,
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
    usage=st.builds(Usage, prompt=st.integers(1, 9), completion=st.integers(0, 9), cached=st.integers(0, 1)),
)
HUGE = Reply(
    content="é\u2028\n" * 300_000,
    reasoning="hm " * 300_000,
    tool_calls=[ToolCall(id="1", name="write", arguments=json.dumps({"path": "x" * 1_000_000}))],
)

each_client = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())


def writer(client: Client) -> Any:
    return client.dialect.writer(client.parse(msgspec.json.encode(client.request([]))), "c1")


def sent_back(client: Client, turn: Any) -> dict[str, Any]:
    """The one assistant message that a turn becomes."""
    request = client.parse(msgspec.json.encode(client.request([turn])))
    (message,) = [message for message in request.messages if message["role"] == "assistant"]
    return message


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def chunked(draw: st.DrawFn, reply: Reply) -> list[Delta]:
    deltas = [Delta(reasoning=text) for text in draw(cut(reply.reasoning or ""))]
    deltas += [Delta(content=text) for text in draw(cut(reply.content or ""))]
    for index, call in enumerate(reply.tool_calls):
        first, *rest = draw(cut(call.arguments))
        pieces = [ToolCallDelta(index=index, id=call.id, name=call.name, arguments=first)]
        pieces += [ToolCallDelta(index=index, arguments=text) for text in rest]
        together = draw(st.integers(1, len(pieces)))
        deltas.append(Delta(tool_calls=tuple(pieces[:together])))
        deltas += [Delta(tool_calls=(piece,)) for piece in pieces[together:]]
    return deltas


def test_every_dialect_is_tested_here() -> None:
    assert DIALECTS.keys() <= CLIENTS.keys()


@each_client
@settings(deadline=None)
@given(reply=REPLIES, ended=ENDS)
def test_a_whole_response_comes_back_as_the_message_that_was_sampled(
    client: Client, reply: Reply, ended: Ended
) -> None:
    if reply.content or reply.tool_calls:
        turn = client.of_whole(json.loads(writer(client).whole(reply, ended)))
        assert meaning(sent_back(client, turn)) == meaning(reply.message())


@each_client
@settings(deadline=None)
@given(data=st.data(), reply=REPLIES, ended=ENDS)
def test_any_chunking_of_a_stream_comes_back_as_the_same_message(
    client: Client, data: st.DataObject, reply: Reply, ended: Ended
) -> None:
    deltas = data.draw(chunked(reply))
    growing = GrowingReply()
    stream = writer(client)
    events = stream.start(data.draw(st.none() | st.just(5)))
    for delta in deltas:
        growing.add(delta)
        events += (stream.keep_alive() if data.draw(st.booleans()) else b"") + stream.delta(delta)
    events += stream.end(ended)
    assert meaning(growing.whole().message()) == meaning(reply.message())
    if reply.content or reply.tool_calls:
        assert meaning(sent_back(client, client.of_stream(events))) == meaning(reply.message())


@each_client
@settings(deadline=None)
@given(data=st.data(), reply=REPLIES)
def test_a_failed_stream_has_no_end(client: Client, data: st.DataObject, reply: Reply) -> None:
    deltas = data.draw(chunked(reply))
    stream = writer(client)
    events = stream.keep_alive() + stream.start(5)
    events += b"".join(stream.delta(delta) for delta in deltas[: data.draw(st.integers(0, len(deltas)))])
    failed = stream.failed(503, "the engine is away", "engine_unavailable")
    assert b"the engine is away" in failed and client.of_stream(events + failed) is None


@each_client
def test_a_huge_response(client: Client) -> None:
    ended = Ended(finish_reason="stop", usage=Usage(prompt=1, completion=1))
    whole = client.of_whole(json.loads(writer(client).whole(HUGE, ended)))
    assert meaning(sent_back(client, whole)) == meaning(HUGE.message())
    stream = writer(client)
    call = ToolCallDelta(index=0, id="1", name="write", arguments=HUGE.tool_calls[0].arguments)
    events = stream.start(1) + stream.delta(Delta(reasoning=HUGE.reasoning or "", content=HUGE.content or ""))
    events += stream.delta(Delta(tool_calls=(call,))) + stream.end(ended)
    assert meaning(sent_back(client, client.of_stream(events))) == meaning(HUGE.message())


@each_client
@settings(deadline=None)
@given(status=st.sampled_from([400, 401, 403, 404, 405, 413, 429, 500, 503]), message=TEXT, code=st.sampled_from(CODES))
def test_every_error_has_its_message(client: Client, status: int, message: str, code: str) -> None:
    error = client.dialect.error(status, message, code=code, param="x")
    assert json.loads(error)["error"]["message"].endswith(message)


def parsed(client: Client, body: bytes) -> ModelRequest | BadRequest:
    """Any other exception is the test's failure; a request can be written for the engine."""
    try:
        request = client.parse(body)
    except BadRequest as error:
        assert str(error) and "\n" not in str(error)
        return error
    msgspec.json.encode([request.model, request.messages, request.tools, request.options])
    assert all(isinstance(message["role"], str) for message in request.messages)
    return request


@each_client
@settings(deadline=None)
@given(body=JSON.map(json.dumps).map(str.encode) | st.binary(max_size=40))
def test_no_body_at_random_breaks_a_parser(client: Client, body: bytes) -> None:
    parsed(client, body)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with something else in one place."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not inside or draw(st.integers(0, 5)) == 0:
        return draw(JSON | st.just({}) | st.just([]))
    place = draw(st.sampled_from(list(inside)))
    changed = value.copy()
    kind = draw(st.sampled_from(["inside", "inside", "inside", "removed", "twice", "renamed"]))
    if kind == "removed":
        del changed[place]
    elif kind == "twice" and isinstance(value, list):
        changed.append(value[place])
    elif kind == "renamed" and isinstance(value, dict):
        changed[draw(TEXT)] = changed.pop(place)
    else:
        changed[place] = draw(mutated(value[place]))
    return changed


def turns(client: Client) -> list[Any]:
    call = ToolCall(id="1", name="read", arguments='{"path":"a"}')
    reply = Reply(content="I will", reasoning="hm", tool_calls=[call])
    ended = Ended(finish_reason="tool_calls", usage=Usage(prompt=1, completion=1))
    return [client.of_whole(json.loads(writer(client).whole(reply, ended)))]


@each_client
def test_the_body_that_is_mutated_is_valid(client: Client) -> None:
    request = parsed(client, msgspec.json.encode(client.request(turns(client))))
    assert isinstance(request, ModelRequest) and len(request.tools) == 2
    assert [message["role"] for message in request.messages][:3] == ["system", "user", "assistant"]


@each_client
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_no_mutation_of_a_valid_body_breaks_a_parser(client: Client, data: st.DataObject) -> None:
    body = client.request(turns(client))
    for _ in range(data.draw(st.integers(1, 2))):
        body = data.draw(mutated(body))
    content = msgspec.json.encode(body)
    first = parsed(client, content)
    if isinstance(first, ModelRequest):
        assert parsed(client, content) == first


@each_client
@settings(deadline=None)
@given(data=st.data())
def test_no_broken_bytes_break_a_parser(client: Client, data: st.DataObject) -> None:
    content = bytearray(msgspec.json.encode(client.request(turns(client))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    parsed(client, bytes(content))
    parsed(client, bytes(content[: data.draw(st.integers(0, len(content)))]))


@each_client
@pytest.mark.parametrize("depth", [100, 300, 100_000])
def test_nothing_is_nested_too_deeply_to_be_answered(client: Client, depth: int) -> None:
    valid = msgspec.json.encode(client.request(turns(client)))
    for place in (b'{"path":{"type":"string"}}', b'"hi"', b'"be brief"', b"0.5"):
        assert place in valid
        for opened, closed in ((b"[", b"]"), (b'{"a":', b"}"), (b'{"properties":{"a":', b"}}")):
            body = valid.replace(place, opened * depth + b"1" + closed * depth)
            try:
                request = client.parse(body)
            except BadRequest as error:
                assert len(str(error)) < 500
            else:
                assert not deeper([request.messages, request.tools, request.options], DEEPEST + 10)
