"""The Google dialect: contents to messages, generationConfig to options, chunks of a stream."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Reply, ToolCall, ToolCallDelta, Usage
from gateway_app.dialects.google_contents import RAW, signature
from gateway_app.dialects.google_generate import GoogleGenerate
from gateway_app.dialects.google_schema import DEEPEST, json_schema

ASKED = [{"role": "user", "parts": [{"text": "hi"}]}]
LIST = {"name": "list", "description": "lists", "parametersJsonSchema": {"type": "object"}}
READ = {"name": "read", "parameters": {"type": "OBJECT", "properties": {"path": {"type": "STRING"}}}}
DECLARED = [{"functionDeclarations": [LIST]}, {"googleSearch": {}, "functionDeclarations": [READ]}]
THINKING = {"thinkingConfig": {"includeThoughts": True}}
USAGE = Usage(prompt=7, completion=3, cached=4)
STOP = Ended(finish_reason="stop", usage=USAGE)


def parse(contents: Any = ASKED, **fields: Any) -> ModelRequest:
    return GoogleGenerate().parse(msgspec.json.encode({"contents": contents} | fields), "policy", True)


def refused(contents: Any = ASKED, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        parse(contents, **fields)
    assert raised.value.param and "\n" not in str(raised.value)
    return raised.value


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def writer(sse: bool = True, **config: Any) -> Any:
    dialect = GoogleGenerate(sse)
    return dialect.writer(parse(generationConfig=config), "c1")


def chunks(events: bytes) -> list[Any]:
    lines = events.split(b"\n\n")
    assert lines.pop() == b"" and all(line.startswith(b"data: ") for line in lines)
    return [msgspec.json.decode(line[6:]) for line in lines]


def parts(chunk: dict[str, Any]) -> list[Any]:
    (candidate,) = chunk["candidates"]
    assert candidate["index"] == 0 and candidate["content"]["role"] == "model"
    return candidate["content"]["parts"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff", None),
        (b"[]", None),
        (b'{"a":' * 100_000, None),
        (b"{}", "contents"),
        (b'{"contents":[]}', "contents"),
        (b'{"contents":"hi"}', "contents"),
        (b'{"contents":[1]}', "contents[0]"),
        (b'{"contents":[{"role":"robot","parts":[]}]}', "contents[0].role"),
        (b'{"contents":[{"role":3}]}', "contents[0].role"),
        (b'{"contents":[{"parts":{}}]}', "contents[0].parts"),
        (b'{"contents":[{"parts":[{"text":1}]}]}', "contents[0].parts[0].text"),
        (b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":{"topK":true}}', "generationConfig.topK"),
    ],
)
def test_a_body_of_another_shape_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as raised:
        GoogleGenerate().parse(body, "policy")
    assert raised.value.param == param and "\n" not in str(raised.value)


def test_the_url_says_model_and_stream() -> None:
    request = parse()
    assert request.model == "policy" and request.streamed and request.shown is False
    body = msgspec.json.encode({"model": "models/gemini", "contents": ASKED})
    assert GoogleGenerate().parse(body).model == "gemini"
    with pytest.raises(BadRequest, match="must name a model"):
        GoogleGenerate().parse(msgspec.json.encode({"contents": ASKED}))


def test_a_history_becomes_messages() -> None:
    contents = [
        user({"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": "aGk-_w=="}}),
        model(
            {"text": "hm", "thought": True},
            {"text": "I "},
            {"text": "will", "thoughtSignature": "c2VlbiBlbHNld2hlcmU="},
            {"functionCall": {"id": "x1", "name": "list", "args": {"path": "/"}}},
            {"functionCall": {"id": "x2", "name": "read"}},
        ),
        user(
            {"functionResponse": {"id": "x1", "name": "list", "response": {"output": "a\nb"}}},
            {"functionResponse": {"id": "x2", "name": "read", "response": {"error": "no"}}},
            {"text": "go on"},
        ),
        {"parts": [{"text": "and"}]},
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk+/w=="}}
    assert parse(contents, systemInstruction={"parts": [{"text": "be brief"}]}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
        {
            "role": "assistant",
            "content": "I will",
            "reasoning_content": "hm",
            "tool_calls": [tool_call("x1", "list", '{"path":"/"}'), tool_call("x2", "read", "{}")],
        },
        {"role": "tool", "tool_call_id": "x1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "x2", "content": '{"error":"no"}'},
        {"role": "user", "content": "go on"},
        {"role": "user", "content": "and"},
    ]


def test_system_instructions_are_text_in_any_form() -> None:
    assert parse(systemInstruction="brief").messages[0] == {"role": "system", "content": "brief"}
    assert parse(system_instruction={"parts": [{"text": "a"}, {"text": "b"}]}).messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert [message["role"] for message in parse(systemInstruction={"parts": []}).messages] == ["user"]
    assert refused(systemInstruction=3).param == refused(systemInstruction=[]).param == "systemInstruction"
    assert refused(systemInstruction={"parts": [{"inlineData": {}}]}).param == "systemInstruction.parts"


def test_snake_case_is_the_same() -> None:
    snake = parse(
        [
            model({"function_call": {"name": "read", "args": {}}}),
            user({"function_response": {"name": "read", "response": {"output": "x"}}}),
            user({"inline_data": {"mime_type": "image/png", "data": "aGk="}}),
        ],
        tools=[{"function_declarations": [{"name": "read", "parameters_json_schema": {"type": "object"}}]}],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["read"]}},
        generation_config={"max_output_tokens": 5, "stop_sequences": ["x"], "top_p": 0.5},
    )
    camel = parse(
        [
            model({"functionCall": {"name": "read", "args": {}}}),
            user({"functionResponse": {"name": "read", "response": {"output": "x"}}}),
            user({"inlineData": {"mimeType": "image/png", "data": "aGk="}}),
        ],
        tools=[{"functionDeclarations": [{"name": "read", "parametersJsonSchema": {"type": "object"}}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}},
        generationConfig={"maxOutputTokens": 5, "stopSequences": ["x"], "topP": 0.5},
    )
    assert snake == camel and camel.options["tool_choice"] == "required" and camel.options["max_tokens"] == 5


def test_missing_ids_come_from_names_and_places() -> None:
    read, listed = {"functionCall": {"name": "read"}}, {"functionCall": {"name": "list"}}

    def response(name: str, text: str) -> dict[str, Any]:
        return {"functionResponse": {"name": name, "response": {"output": text}}}

    first = [model(read, listed, read), user(response("read", "1"), response("read", "2"), response("list", "3"))]
    contents = [*first, model(read), user(response("read", "4"))]
    messages = parse(contents).messages
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    told = [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]
    assert told == [("call_0", "1"), ("call_2", "2"), ("call_1", "3"), ("call_3", "4")]
    assert messages[: len(parse(first).messages)] == parse(first).messages
    assert refused([model(read), user(response("list", "x"))]).param == "contents[1].parts[0].functionResponse"


def test_contents_of_a_model_that_follow_each_other_are_one_message() -> None:
    cut = [model({"text": "hm", "thought": True}), model({"text": "a"}), model({"text": ""}), model({"text": "b"})]
    whole = [model({"text": "hm", "thought": True}, {"text": "ab"})]
    assert parse([*cut, *ASKED]).messages == parse([*whole, *ASKED]).messages


def test_a_signature_brings_the_reasoning_back_where_the_thought_was_dropped() -> None:
    reply = Reply(content=None, reasoning="hm\u2028", tool_calls=[ToolCall(id="1", name="read", arguments="{}")])
    body = msgspec.json.decode(writer().whole(reply, STOP))
    assert parts(body) == [
        {"functionCall": {"id": "1", "name": "read", "args": {}}, "thoughtSignature": signature("hm\u2028")}
    ]
    (message,) = parse([body["candidates"][0]["content"]]).messages
    assert message == reply.message()
    both = [model({"text": "x", "thought": True}), model({"text": "y", "thoughtSignature": signature("x")})]
    assert parse(both).messages == [{"role": "assistant", "content": "y", "reasoning_content": "x"}]


@pytest.mark.parametrize(
    "part",
    [
        {"fileData": {"fileUri": "gs://x"}},
        {"file_data": {"fileUri": "gs://x"}},
        {"executableCode": {"code": "1"}},
        {"inlineData": {"mimeType": "audio/wav", "data": ""}},
        {"inlineData": {"data": ""}},
        {"inlineData": {"mimeType": "text/plain", "data": "no base64!"}},
        {"inlineData": {"mimeType": "text/plain", "data": "/w=="}},
        {"functionCall": {"name": "read"}},
        {"somethingNew": 1},
    ],
)
def test_parts_that_cannot_be_served_are_refused(part: dict[str, Any]) -> None:
    assert str(refused([user(part)]).param).startswith("contents[0].parts[0]")


@pytest.mark.parametrize(
    "part", [{"inlineData": {"mimeType": "image/png", "data": ""}}, {"functionCall": {"args": {}}}, {"fileData": {}}]
)
def test_a_model_s_parts_are_text_and_calls(part: dict[str, Any]) -> None:
    assert str(refused([model(part)]).param).startswith("contents[0].parts[0]")


def test_text_files_are_text() -> None:
    data = base64.b64encode("é".encode()).decode()
    assert parse([user({"inlineData": {"mimeType": "text/plain", "data": data}})]).messages[0]["content"] == "é"


def test_images_in_responses_stand_beside_their_text() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    response = {"functionResponse": {"name": "read", "id": "1", "response": {"output": "see"}, "parts": [image]}}
    (message,) = parse([user(response)]).messages
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]


def test_functions_and_their_choice() -> None:
    request = parse(tools=DECLARED)
    assert request.tools == [
        {"type": "function", "function": {"name": "list", "description": "lists", "parameters": {"type": "object"}}},
        {
            "type": "function",
            "function": {
                "name": "read",
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        },
    ]
    assert request.options == {}

    def choose(**config: Any) -> ModelRequest:
        return parse(tools=DECLARED, toolConfig={"functionCallingConfig": config})

    assert choose(mode="AUTO").options == choose(mode="VALIDATED").options == {}
    assert choose(mode="NONE").options == {"tool_choice": "none"}
    assert choose(mode="ANY").options == {"tool_choice": "required"} and len(choose(mode="ANY").tools) == 2
    one = choose(mode="ANY", allowedFunctionNames=["read"])
    assert [tool["function"]["name"] for tool in one.tools] == ["read"]
    assert refused(toolConfig={"functionCallingConfig": {"mode": "ANY"}})
    assert refused(toolConfig={"functionCallingConfig": {"mode": "SOMETIMES"}})
    assert refused(tools=DECLARED, toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}})
    assert refused(tools=[{"functionDeclarations": [{"description": "x"}]}])
    assert parse(tools=[{"googleSearch": {}}, {"codeExecution": {}}]).tools == []


def test_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["type"],
        "properties": {
            "type": {"type": "STRING", "enum": ["A", "B"], "nullable": True},
            "nested": {"any_of": [{"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1"}, {"type": "NULL"}]},
            "any": {"type": "TYPE_UNSPECIFIED", "description": "STRING"},
        },
        "required": ["type"],
    }
    assert json_schema(schema, "x") == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["A", "B"]},
            "nested": {"anyOf": [{"type": "array", "items": {"type": "integer"}, "minItems": 1}, {"type": "null"}]},
            "any": {"description": "STRING"},
        },
        "required": ["type"],
    }
    deep: dict[str, Any] = {"type": "STRING"}
    for _ in range(DEEPEST + 1):
        deep = {"items": deep}
    assert refused(tools=[{"functionDeclarations": [{"name": "x", "parameters": deep}]}])


def test_sampling_parameters() -> None:
    config = {
        "temperature": 0,
        "topP": 0.9,
        "topK": 40.0,
        "seed": 3,
        "presencePenalty": 0.1,
        "frequencyPenalty": 0.2,
        "maxOutputTokens": 9,
        "stopSequences": ["a", "b"],
        "candidateCount": 1,
        "responseMimeType": "text/plain",
        "responseModalities": ["TEXT"],
        "responseLogprobs": True,
        "logprobs": 2,
        "thinkingConfig": {"thinkingBudget": 1024},
    }
    assert parse(generationConfig=config).options == {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "max_tokens": 9,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 2,
    }


def test_thinking() -> None:
    def thinking(**config: Any) -> ModelRequest:
        return parse(generationConfig={"thinkingConfig": config})

    assert thinking(includeThoughts=True).shown is True and thinking(includeThoughts=True).options == {}
    assert thinking(thinkingBudget=0).options == {"reasoning_effort": "none"}
    assert thinking(thinkingBudget=-1).options == {}
    assert thinking(thinkingLevel="HIGH").options == {"reasoning_effort": "high"}
    assert refused(generationConfig={"thinkingConfig": {"thinkingLevel": "SOME"}})


def test_structured_output() -> None:
    def structured(**config: Any) -> Any:
        return parse(generationConfig=config).options

    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
    upper = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    assert structured(responseMimeType="application/json", responseSchema=upper) == asked
    assert structured(responseMimeType="application/json", responseJsonSchema=schema) == asked
    assert structured(responseMimeType="application/json") == {"response_format": {"type": "json_object"}}
    choices = structured(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["a", "b"]})
    assert choices == {"structured_outputs": {"choice": ["a", "b"]}}


@pytest.mark.parametrize(
    "config",
    [
        {"candidateCount": 2},
        {"responseModalities": ["IMAGE"]},
        {"speechConfig": {"voice": "x"}},
        {"maxOutputTokens": 0},
        {"stopSequences": [""]},
        {"stopSequences": "x"},
        {"stopSequences": [1]},
        {"logprobs": 2},
        {"logprobs": 50, "responseLogprobs": True},
        {"temperature": "hot"},
        {"responseMimeType": "image/png"},
        {"responseMimeType": "text/x.enum"},
        {"responseSchema": {"type": "OBJECT"}},
    ],
)
def test_what_cannot_be_served_is_refused(config: dict[str, Any]) -> None:
    assert str(refused(generationConfig=config).param).startswith("generationConfig.")


def test_cached_contents_are_refused_and_hints_dropped() -> None:
    assert refused(cachedContent="cachedContents/x").param == "cachedContent"
    assert parse(safetySettings=[{"category": "X"}], labels={"a": "b"}) == parse()


def test_a_request_to_count_may_hold_a_whole_request() -> None:
    inner = {"model": "models/policy", "contents": ASKED, "systemInstruction": {"parts": [{"text": "s"}]}}
    request = GoogleGenerate().parse(msgspec.json.encode({"generateContentRequest": inner}), "policy")
    assert [message["role"] for message in request.messages] == ["system", "user"]
    assert GoogleGenerate().count(12) == b'{"totalTokens":12}'


def test_a_stream_is_a_row_of_chunks_and_the_last_has_calls_reason_and_usage() -> None:
    stream = writer(**THINKING)
    events = chunks(
        stream.keep_alive()
        + stream.start(7)
        + stream.delta(Delta(reasoning="hm"))
        + stream.delta(Delta(content="he\u2028"))
        + stream.delta(Delta(tool_calls=(ToolCallDelta(index=0, id="1", name="read", arguments='{"a"'),)))
        + stream.delta(Delta(tool_calls=(ToolCallDelta(index=1, id="2", name="list", arguments="no {json"),)))
        + stream.delta(Delta(tool_calls=(ToolCallDelta(index=0, arguments=":1}"),)))
        + stream.end(Ended(finish_reason="tool_calls", usage=USAGE))
    )
    assert {(event["modelVersion"], event["responseId"]) for event in events} == {("policy", "c1")}
    assert [parts(event) for event in events] == [
        [{"text": ""}],
        [{"text": "hm", "thought": True}],
        [{"text": "he\u2028"}],
        [
            {"functionCall": {"id": "1", "name": "read", "args": {"a": 1}}, "thoughtSignature": signature("hm")},
            {"functionCall": {"id": "2", "name": "list", "args": {RAW: "no {json"}}},
        ],
    ]
    assert [event["candidates"][0].get("finishReason") for event in events] == [None, None, None, "STOP"]
    assert "usageMetadata" not in events[1]
    assert events[-1]["usageMetadata"] == {
        "promptTokenCount": 7,
        "candidatesTokenCount": 3,
        "totalTokenCount": 10,
        "cachedContentTokenCount": 4,
    }


def test_no_event_has_what_ends_a_line_for_some_clients() -> None:
    assert len(writer().delta(Delta(content="a\u2028b\u2029c\u0085\x0b")).decode().splitlines()) == 2


def test_thoughts_are_shown_to_those_who_ask() -> None:
    stream = writer()
    assert stream.delta(Delta(reasoning="hm")) == b""
    (last,) = chunks(stream.end(Ended(finish_reason="length", usage=USAGE)))
    assert parts(last) == [{"text": "", "thoughtSignature": signature("hm")}]
    assert last["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_a_stream_without_sse_is_one_array() -> None:
    stream = writer(sse=False)
    body = stream.keep_alive() + stream.start(7) + stream.delta(Delta(content="a")) + stream.end(STOP)
    assert [parts(chunk)[0]["text"] for chunk in msgspec.json.decode(body)] == ["", "a", ""]
    at_once = writer(sse=False)
    assert len(msgspec.json.decode(at_once.end(STOP))) == 1


@pytest.mark.parametrize("sse", [True, False])
def test_a_failed_stream_cannot_be_taken_for_its_end(sse: bool) -> None:
    stream = writer(sse=sse)
    written = stream.delta(Delta(content="a")) + stream.failed(503, "away", "engine_unavailable")
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(written)
    error = written.partition(b"\n\n" if sse else b",\r\n")[2]
    assert msgspec.json.decode(error)["error"]["status"] == "UNAVAILABLE" and b"finishReason" not in written


def test_log_probs_have_google_s_shape() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    shown = {
        "topCandidates": [{"candidates": [{"token": "b", "logProbability": -1.0}]}],
        "chosenCandidates": [{"token": "a", "logProbability": -0.5}],
    }
    (chunk,) = chunks(writer().delta(Delta(content="a", logprobs=[entry])))
    assert chunk["candidates"][0]["logprobsResult"] == shown
    body = msgspec.json.decode(writer().whole(Reply(content="a", logprobs=[entry]), STOP))
    assert body["candidates"][0]["logprobsResult"] == shown


def test_a_whole_body() -> None:
    reply = Reply(content="a", reasoning="hm", tool_calls=[ToolCall(id="1", name="read", arguments='["no object"]')])
    body = msgspec.json.decode(writer(**THINKING).whole(reply, STOP))
    assert parts(body) == [
        {"text": "hm", "thought": True},
        {"text": "a"},
        {
            "functionCall": {"id": "1", "name": "read", "args": {RAW: '["no object"]'}},
            "thoughtSignature": signature("hm"),
        },
    ]
    assert body["candidates"][0]["finishReason"] == "STOP" and body["usageMetadata"]["totalTokenCount"] == 10
    assert parts(msgspec.json.decode(writer().whole(Reply(), STOP))) == [{"text": ""}]


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "null", "[1]", '"x"', "{", '{"a":1} x', "😀"),
        '{"a":' * 5000 + "1" + "}" * 5000,
        '{"a":' * 500 + "1" + "}" * 500,
        f'{{"{RAW}":"x"}}',
        f'{{"{RAW}":"x","b":1}}',
    ],
)
def test_arguments_that_are_no_plain_object_come_back_as_they_were(arguments: str) -> None:
    reply = Reply(content=None, tool_calls=[ToolCall(id="1", name="read", arguments=arguments)])
    content = msgspec.json.decode(writer().whole(reply, STOP))["candidates"][0]["content"]
    (message,) = parse([content]).messages
    assert message["tool_calls"][0]["function"]["arguments"] == (arguments or "{}")


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (413, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_errors_have_google_s_status(status: int, name: str) -> None:
    error = msgspec.json.decode(GoogleGenerate().error(status, "why", code="session_ended", param="contents"))["error"]
    assert (error["code"], error["status"], error["message"]) == (status, name, "why")
    assert error["details"][0]["reason"] == "SESSION_ENDED"
    assert error["details"][1]["fieldViolations"] == [{"field": "contents", "description": "why"}]
    assert "details" not in msgspec.json.decode(GoogleGenerate().error(status, "why"))["error"]


def test_an_overflow_has_google_s_words() -> None:
    message = "prompt is too long: 9000 tokens > 8192 maximum"
    error = msgspec.json.decode(GoogleGenerate().error(400, message, code="context_overflow"))["error"]
    assert error["message"] == "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."
    assert error["status"] == "INVALID_ARGUMENT"
