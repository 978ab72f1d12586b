"""Google's ``generateContent``, ``streamGenerateContent`` and ``countTokens``.

The URL says the model and whether the response is streamed. A stream with ``alt=sse`` is one of events; without it, it
is one JSON array, which ``GoogleGenerate(sse=False)`` writes. Both have a chunk for each delta. Calls of functions are
sent whole, all in the chunk that ends the response: a program that takes a cut stream for the end then runs none.

Thoughts are shown to those who ask for them (``includeThoughts``). A thinking budget is a hint, but for 0: no thinking.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Reply, ToolCall, Usage, Writer
from gateway_app.dialects.google_contents import arguments_object, messages, signature, system_message
from gateway_app.dialects.google_fields import Object, field, objects, strings
from gateway_app.dialects.google_schema import json_schema
from gateway_app.dialects.reply import GrowingReply
from gateway_app.dialects.wire import decoded, encode, event, overflow

_DECODER = msgspec.json.Decoder(dict[str, Any])
_CONFIG = "generationConfig"
_NUMBER = (int, float)
_SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", _NUMBER),
    "topP": ("top_p", _NUMBER),
    "topK": ("top_k", _NUMBER),
    "seed": ("seed", int),
    "presencePenalty": ("presence_penalty", _NUMBER),
    "frequencyPenalty": ("frequency_penalty", _NUMBER),
    "maxOutputTokens": ("max_tokens", int),
    "responseLogprobs": ("logprobs", bool),
    "logprobs": ("top_logprobs", int),
}
_EFFORTS = frozenset({"minimal", "low", "medium", "high"})

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


class GoogleGenerate:
    """``shown`` of its requests is whether thoughts are shown."""

    name = "google.generate"

    def __init__(self, sse: bool = True) -> None:
        self._sse = sse

    def parse(self, content: bytes, model: str | None = None, streamed: bool = False) -> ModelRequest:
        body = decoded(_DECODER, content)
        body = field(body, "generateContentRequest", dict) or body
        model = model or field(body, "model", str)
        if not model:
            raise BadRequest("the URL must name a model: /v1beta/models/MODEL:generateContent", "model")
        if field(body, "cachedContent", object):
            raise BadRequest("cachedContent must be left out: send the contents themselves", "cachedContent")
        asked = messages(objects(body, "contents"))
        if not asked:
            raise BadRequest("contents must not be empty", "contents")
        config = field(body, _CONFIG, dict) or {}
        tools, choice = _chosen(_tools(body), body)
        thinking = field(config, "thinkingConfig", dict, _CONFIG) or {}
        return ModelRequest(
            model=model.removeprefix("models/"),
            messages=system_message(field(body, "systemInstruction", object)) + asked,
            tools=tools,
            options=_sampling(config) | _format(config) | _effort(thinking) | choice,
            streamed=streamed,
            shown=bool(field(thinking, "includeThoughts", bool, f"{_CONFIG}.thinkingConfig")),
        )

    def writer(self, request: ModelRequest, call_id: str) -> Writer:
        return GoogleWriter(call_id, request.model, bool(request.shown), self._sse)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        if code == "context_overflow" and (sizes := overflow(message)):
            message = f"The input token count ({sizes[0]}) exceeds the maximum number of tokens allowed ({sizes[1]})."
        error: Object = {
            "code": status,
            "message": message,
            "status": STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL"),
        }
        details: list[Object] = []
        if code:
            details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code.upper()})
        if param:
            violation = {"field": param, "description": message}
            details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
        return encode({"error": error | ({"details": details} if details else {})})

    def count(self, tokens: int) -> bytes:
        return encode({"totalTokens": tokens})


class GoogleWriter:
    """What is the same in each chunk is encoded once."""

    def __init__(self, call_id: str, model: str, thoughts: bool, sse: bool) -> None:
        self._ids = {"modelVersion": model, "responseId": call_id}
        self._tail = b"," + encode(self._ids)[1:]
        self._thoughts = thoughts
        self._sse = sse
        self._opened = False
        self._kept = GrowingReply()
        """What goes into the last chunk: the calls, and the reasoning for the signature."""

    def start(self, prompt_tokens: int | None) -> bytes:
        """Google's streams have no event that opens them."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        parts = []
        if delta.reasoning or delta.tool_calls:
            self._kept.add(Delta(reasoning=delta.reasoning, tool_calls=delta.tool_calls))
            if delta.reasoning and self._thoughts:
                parts.append(b'{"text":' + encode(delta.reasoning) + b',"thought":true}')
        if delta.content:
            parts.append(b'{"text":' + encode(delta.content) + b"}")
        if not parts and not delta.logprobs:
            return b""
        logprobs = b',"logprobsResult":' + encode(_logprobs(delta.logprobs)) if delta.logprobs else b""
        return self._chunk(b",".join(parts), logprobs + b"}]")

    def end(self, ended: Ended) -> bytes:
        kept = self._kept.whole()
        parts = _parts(Reply(content="", tool_calls=kept.tool_calls), kept.reasoning)
        reason = encode(FINISH_REASONS[ended.finish_reason])
        last = self._chunk(
            encode(parts)[1:-1], b',"finishReason":' + reason + b'}],"usageMetadata":' + encode(_usage(ended.usage))
        )
        return last if self._sse else last + b"]"

    def keep_alive(self) -> bytes:
        return self._chunk(b'{"text":""}', b"}]")

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """Bare, and what it stands in stays open: Google's clients read an event with an error as an empty chunk."""
        error = GoogleGenerate().error(status, message, code=code)
        return error if self._sse else self._element(error)

    def whole(self, reply: Reply, ended: Ended) -> bytes:
        parts = [{"text": reply.reasoning, "thought": True}] if reply.reasoning and self._thoughts else []
        candidate: Object = {
            "content": {"parts": parts + _parts(reply, reply.reasoning), "role": "model"},
            "index": 0,
            "finishReason": FINISH_REASONS[ended.finish_reason],
        }
        if reply.logprobs:
            candidate["logprobsResult"] = _logprobs(reply.logprobs)
        return encode({"candidates": [candidate], "usageMetadata": _usage(ended.usage)} | self._ids)

    def _chunk(self, parts: bytes, rest: bytes) -> bytes:
        """``rest`` goes on in the candidate after its index, and closes the list of candidates."""
        data = b'{"candidates":[{"content":{"parts":[' + parts + b'],"role":"model"},"index":0' + rest + self._tail
        return event(data) if self._sse else self._element(data)

    def _element(self, data: bytes) -> bytes:
        before = b",\r\n" if self._opened else b"["
        self._opened = True
        return before + data


def _parts(reply: Reply, reasoning: str | None) -> list[Object]:
    """The text, if there is any or nothing else, and the calls; the first call or else the text has the signature."""
    calls: list[Object] = [{"functionCall": _call(call)} for call in reply.tool_calls]
    text: list[Object] = [{"text": reply.content or ""}] if reply.content or not calls else []
    if reasoning:
        (calls or text)[0]["thoughtSignature"] = signature(reasoning)
    return text + calls


def _call(call: ToolCall) -> Object:
    named = {"name": call.name, "args": arguments_object(call.arguments)}
    return {"id": call.id} | named if call.id else named


def _usage(usage: Usage) -> Object:
    counts = {
        "promptTokenCount": usage.prompt,
        "candidatesTokenCount": usage.completion,
        "totalTokenCount": usage.prompt + usage.completion,
    }
    return counts | ({"cachedContentTokenCount": usage.cached} if usage.cached else {})


def _logprobs(entries: list[Object]) -> Object:
    """From OpenAI's entries."""

    def named(entry: Object) -> Object:
        return {"token": entry.get("token"), "logProbability": entry.get("logprob")}

    return {
        "topCandidates": [{"candidates": [named(top) for top in entry.get("top_logprobs") or []]} for entry in entries],
        "chosenCandidates": [named(entry) for entry in entries],
    }


def _sampling(config: Object) -> Object:
    if (field(config, "candidateCount", int, _CONFIG) or 1) != 1:
        raise BadRequest("candidateCount must be 1: one response is sampled a call", f"{_CONFIG}.candidateCount")
    if any(kind != "TEXT" for kind in strings(config, "responseModalities", _CONFIG)):
        raise BadRequest("responseModalities must be TEXT: responses are text", f"{_CONFIG}.responseModalities")
    if field(config, "speechConfig", object, _CONFIG):
        raise BadRequest("speechConfig must be left out: responses are text", f"{_CONFIG}.speechConfig")
    found: Object = {}
    for name, (ours, kind) in _SAMPLING.items():
        value = field(config, name, kind, _CONFIG)
        if value is not None:
            found[ours] = value
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    if found.get("max_tokens", 1) < 1:
        raise BadRequest("maxOutputTokens must be at least 1", f"{_CONFIG}.maxOutputTokens")
    if not 0 <= found.get("top_logprobs", 0) <= 20 or ("top_logprobs" in found and not found.get("logprobs")):
        raise BadRequest("logprobs must be from 0 to 20, with responseLogprobs: true", f"{_CONFIG}.logprobs")
    stop = strings(config, "stopSequences", _CONFIG)
    if "" in stop:
        raise BadRequest("stopSequences must not hold an empty one", f"{_CONFIG}.stopSequences")
    return found | ({"stop": stop} if stop else {})


def _format(config: Object) -> Object:
    """Structured output."""
    kind = field(config, "responseMimeType", str, _CONFIG) or "text/plain"
    schema = field(config, "responseSchema", dict, _CONFIG)
    if schema is not None:
        schema = json_schema(schema, f"{_CONFIG}.responseSchema")
    for name in ("responseJsonSchema", "_responseJsonSchema"):
        schema = schema if schema is not None else field(config, name, dict, _CONFIG)
    if kind == "text/plain" and schema is None:
        return {}
    if kind == "text/x.enum" and schema and schema.get("enum"):
        return {"structured_outputs": {"choice": strings(schema, "enum", f"{_CONFIG}.responseSchema")}}
    if kind != "application/json":
        raise BadRequest(
            "responseMimeType must be application/json with a schema, text/x.enum with an enum, or text/plain",
            f"{_CONFIG}.responseMimeType",
        )
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}


def _effort(thinking: Object) -> Object:
    where = f"{_CONFIG}.thinkingConfig"
    level = (field(thinking, "thinkingLevel", str, where) or "").lower()
    if level in _EFFORTS:
        return {"reasoning_effort": level}
    if level not in ("", "thinking_level_unspecified"):
        raise BadRequest(f"thinkingLevel must be one of {', '.join(sorted(_EFFORTS))}", f"{where}.thinkingLevel")
    return {"reasoning_effort": "none"} if field(thinking, "thinkingBudget", int, where) == 0 else {}


def _tools(body: Object) -> list[Object]:
    """Declared functions. Google's own tools (search, code execution …) do not exist here, and are left out."""
    declared = [
        (declaration, f"tools[{place}].functionDeclarations[{number}]")
        for place, tool in enumerate(objects(body, "tools"))
        for number, declaration in enumerate(objects(tool, "functionDeclarations", f"tools[{place}]"))
    ]
    return [{"type": "function", "function": _function(declaration, where)} for declaration, where in declared]


def _function(declaration: Object, where: str) -> Object:
    function: Object = {"name": field(declaration, "name", str, where)}
    if not function["name"]:
        raise BadRequest(f"{where}.name must be a string", f"{where}.name")
    description = field(declaration, "description", str, where)
    if description is not None:
        function["description"] = description
    parameters = field(declaration, "parametersJsonSchema", dict, where)
    if parameters is None and (schema := field(declaration, "parameters", dict, where)) is not None:
        parameters = json_schema(schema, f"{where}.parameters")
    if parameters is not None:
        function["parameters"] = parameters
    return function


def _chosen(tools: list[Object], body: Object) -> tuple[list[Object], Object]:
    """The tools that may be called, and ``tool_choice``. The engine keeps to some tools only by knowing no others."""
    config = field(field(body, "toolConfig", dict) or {}, "functionCallingConfig", dict, "toolConfig") or {}
    where = "toolConfig.functionCallingConfig"
    mode = (field(config, "mode", str, where) or "AUTO").upper()
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise BadRequest(f"{where}.mode must be AUTO, ANY, NONE or VALIDATED", f"{where}.mode")
    allowed = strings(config, "allowedFunctionNames", where)
    if allowed and mode in ("ANY", "VALIDATED"):
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        if not tools:
            raise BadRequest(
                f"{where}.allowedFunctionNames names no declared function", f"{where}.allowedFunctionNames"
            )
    if mode == "ANY" and not tools:
        raise BadRequest(f"{where}.mode is ANY, but no functions are declared", f"{where}.mode")
    choice = {"ANY": "required", "NONE": "none"}.get(mode, "auto")
    return tools, {"tool_choice": choice} if tools and choice != "auto" else {}
