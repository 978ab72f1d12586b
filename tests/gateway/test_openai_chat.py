"""The Chat Completions dialect by itself."""

from __future__ import annotations

import msgspec
import pytest

from gateway_app.dialects.openai_chat import BadRequest, OpenAIChat, StreamedMessage, clean_message
from gateway_app.sample import effective_sampling


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff", None),
        (b"[]", "messages"),
        (b'{"model":"m","messages":"x"}', "messages"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"m","messages":[],"n":2}', "n"),
        (b'{"model":"m","messages":[],"tools":{}}', "tools"),
    ],
)
def test_a_bad_request_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        OpenAIChat.parse(body)
    assert refused.value.param == param


def test_unknown_fields_go_to_the_engine() -> None:
    request = OpenAIChat.parse(b'{"model":"gpt-x","messages":[],"stream":true,"store":false,"stop":["a"],"n":1}')
    assert request.for_engine("policy") == request.body | {"model": "policy"}
    assert request.body["store"] is False and request.streamed and not request.include_usage


def test_deltas_add_up_to_the_message() -> None:
    message = StreamedMessage()
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "bash", "arguments": None}}
    for delta in (
        {"role": "assistant", "content": "he", "reasoning": None},
        {"content": "y", "tool_calls": [call]},
        {"tool_calls": [{"id": None, "index": 0, "function": {"name": None, "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"id": "2", "index": 1, "function": {"name": "read", "arguments": "{}"}}]},
    ):
        message.add(clean_message(delta))
    assert message.whole() == {
        "role": "assistant",
        "content": "hey",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"a":1}'}},
            {"id": "2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
        ],
    }


def test_a_stream_ends_with_reason_usage_and_done() -> None:
    events = OpenAIChat("c", "m").finish("stop", {"total_tokens": 3}).split(b"\n\n")
    reason, usage = (msgspec.json.decode(event.removeprefix(b"data: ")) for event in events[:2])
    assert reason["choices"][0]["finish_reason"] == "stop" and reason["object"] == "chat.completion.chunk"
    assert usage["choices"] == [] and usage["usage"] == {"total_tokens": 3}
    assert events[2:] == [b"data: [DONE]", b""]


def test_parameters_that_reshape_the_distribution_are_named() -> None:
    plain = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "bad_words": [], "seed": 4}
    assert not effective_sampling(plain).reshapes
    assert effective_sampling(plain).seed == 4
    penalised = effective_sampling(plain | {"presence_penalty": 0.5, "structured_outputs": {"json": "{}"}})
    assert penalised.reshapes and penalised.altered == ["presence_penalty", "structured_outputs"]
