"""OpenAI Responses: ``POST /v1/responses``, without state: a request brings its whole history.

What would need state (``previous_response_id``, ``conversation``, ``background``, ``prompt``, references to items) is
refused. What has no meaning for sampling (``store``, ``metadata``, ``client_metadata``, ``service_tier``, hints for
caches, ``text.verbosity``, unknown fields) is dropped, and so are the tools that a provider runs itself.
``instructions`` are the first system message; ``reasoning.effort`` is passed on for templates that look at it.

Reasoning goes out in an item whose ``encrypted_content`` brings it back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway_app.dialects.chat_completions import OpenAIChat
from gateway_app.dialects.dialect import BadRequest, ModelRequest, Writer
from gateway_app.dialects.responses_input import Item, messages
from gateway_app.dialects.responses_tools import Object, Toolbox
from gateway_app.dialects.responses_writer import ResponseWriter, Shown
from gateway_app.dialects.wire import check_left_out, decoded, encode

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
LOGPROBS = "message.output_text.logprobs"

SAMPLING: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "stop": str | list[str],
}
"""Fields that the engine takes under the same name; most are no part of OpenAI's API, but engines have them there."""

NO_STATE = "nothing is kept here: send the whole history in input"
REFUSED: dict[str, tuple[Any, str]] = {
    "previous_response_id": (None, NO_STATE),
    "conversation": (None, NO_STATE),
    "background": (False, "a response is sampled while its caller waits"),
    "prompt": (None, "there are no stored prompts: send instructions and input"),
    "truncation": ("disabled", "a prompt that is too long is refused, not cut"),
    "context_management": (None, "nothing is cut out of a history here"),
    "n": (1, "one response is sampled a call"),
}
"""Name → (the value that asks for nothing, why any other is refused)."""


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


_BODY: Any = msgspec.defstruct(
    "ResponsesBody",
    [
        ("model", str),
        ("input", str | list[Item]),
        ("instructions", str | None, None),
        ("tools", list[Object] | None, None),
        ("tool_choice", str | Object | None, None),
        ("parallel_tool_calls", bool | None, None),
        ("max_output_tokens", int | None, None),
        ("text", Object | None, None),
        ("reasoning", Reasoning | None, None),
        ("include", list[str] | None, None),
        ("top_logprobs", int | None, None),
        ("stream", bool | None, None),
        *((name, kind | None, None) for name, kind in SAMPLING.items()),
        *((name, Any, None) for name in REFUSED),
    ],
)
_DECODER = msgspec.json.Decoder(_BODY)


class OpenAIResponses:
    """``shown`` of its requests is a ``Shown``."""

    name = "openai.responses"

    def parse(self, content: bytes, model: str | None = None, streamed: bool = False) -> ModelRequest:
        body = decoded(_DECODER, content)
        check_left_out(body, REFUSED)
        toolbox = Toolbox(body.tools or [])
        tools, choice = toolbox.chosen(body.tool_choice)
        history = messages(body.input, toolbox)
        if body.instructions:
            history.insert(0, {"role": "system", "content": body.instructions})
        if not history:
            raise BadRequest("input must not be empty", "input")
        options = _options(body)
        if choice is not None:
            options["tool_choice"] = choice
        if tools and body.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = body.parallel_tool_calls
        return ModelRequest(
            model=body.model,
            messages=history,
            tools=tools,
            options=options,
            streamed=bool(body.stream),
            shown=Shown(settings=_settings(body), named=toolbox.named, logprobs=bool(options.get("logprobs"))),
        )

    def writer(self, request: ModelRequest, call_id: str) -> Writer:
        return ResponseWriter(request.model, call_id, request.shown or Shown())

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        """The shape is one for all of OpenAI's APIs."""
        return OpenAIChat().error(status, message, code=code, param=param)

    def count(self, tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": tokens})


def _options(body: Any) -> Object:
    options: Object = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if isinstance(stop := options.get("stop"), str):
        options["stop"] = [stop]
    if body.max_output_tokens is not None:
        if body.max_output_tokens < 1:
            raise BadRequest("max_output_tokens must be at least 1", "max_output_tokens")
        options["max_tokens"] = body.max_output_tokens
    if body.reasoning and body.reasoning.effort is not None:
        if body.reasoning.effort not in EFFORTS:
            raise BadRequest(f"reasoning.effort must be one of {', '.join(sorted(EFFORTS))}", "reasoning.effort")
        options["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or []):
        options["logprobs"] = True
        if body.top_logprobs is not None:
            if not 0 <= body.top_logprobs <= 20:
                raise BadRequest("top_logprobs must be from 0 to 20", "top_logprobs")
            options["top_logprobs"] = body.top_logprobs
    return options | _response_format((body.text or {}).get("format"))


def _response_format(wanted: Any) -> Object:
    if wanted is None or wanted == {"type": "text"}:
        return {}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise BadRequest("text.format must be of type text, json_object or json_schema with a schema", "text.format")
    named = wanted.get("name")
    schema: Object = {"name": named if isinstance(named, str) and named else "output", "schema": wanted["schema"]}
    if isinstance(wanted.get("strict"), bool):
        schema["strict"] = wanted["strict"]
    return {"response_format": {"type": kind, "json_schema": schema}}


def _settings(body: Any) -> Object:
    """What a response repeats of its request."""
    reasoning = body.reasoning or Reasoning()
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto",
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "text": {"format": {"type": "text"}} | (body.text or {}),
    }
