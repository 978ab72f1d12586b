"""OpenAI Chat Completions: ``POST /v1/chat/completions``.

The request has our shape already, so messages pass as they are. What the engine knows of the other fields goes on. What
has no meaning for sampling (metadata, store, user, hints for caches and queues) is dropped. What would change the
prompt behind our back, or make something else of the response than one sample with its ids, is refused with the reason.

A keep-alive is a chunk without choices: some clients do not count comments.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import msgspec

from gateway_app.dialects.chat_messages import checked_messages, checked_tools
from gateway_app.dialects.dialect import BadRequest, Delta, Ended, ModelRequest, Reply, ToolCallDelta, Usage, Writer
from gateway_app.dialects.wire import check_left_out, decoded, encode, event, overflow

PASSED: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "logit_bias": dict[str, float],
    "min_tokens": int,
    "ignore_eos": bool,
    "stop_token_ids": list[int],
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
    "logprobs": bool,
    "top_logprobs": int,
    "response_format": dict[str, Any],
    "structured_outputs": dict[str, Any],
    "parallel_tool_calls": bool,
    "reasoning_effort": str,
    "thinking_token_budget": int,
    "include_reasoning": bool,
    "chat_template_kwargs": dict[str, Any],
}
"""Fields that the engine takes under the same name."""

READ: dict[str, Any] = {
    "stream": bool,
    "stream_options": dict[str, Any],
    "tools": list[dict[str, Any]],
    "tool_choice": str | dict[str, Any],
    "stop": str | list[str],
    "max_tokens": int,
    "max_completion_tokens": int,
    "guided_json": str | dict[str, Any],
    "guided_regex": str,
    "guided_choice": list[str],
    "guided_grammar": str,
    "guided_whitespace_pattern": str,
    "enable_thinking": bool,
}
"""Fields that go to the engine in another form, or are for us."""

PROMPT = "it would change the prompt behind its messages"
REFUSED: dict[str, tuple[Any, str]] = {
    "n": (1, "one response is sampled a call"),
    "best_of": (1, "one response is sampled a call"),
    "use_beam_search": (False, "a beam is not a sample"),
    "watermarking": (False, "it changes what is sampled in a way that is not recorded"),
    "repetition_detection": (None, "it ends responses in a way that is not recorded"),
    "include_stop_str_in_output": (False, "a stop string is not part of the response"),
    "prompt_logprobs": (None, "only sampled tokens have log-probs"),
    "logprob_token_ids": (None, "log-probs are those of the sampled tokens; use top_logprobs"),
    "echo": (False, PROMPT),
    "add_generation_prompt": (True, PROMPT),
    "continue_final_message": (False, PROMPT),
    "add_special_tokens": (False, PROMPT),
    "chat_template": (None, PROMPT),
    "documents": (None, f"{PROMPT}; put them into a message"),
    "truncate_prompt_tokens": (None, PROMPT),
    "truncation_side": (None, PROMPT),
    "mm_processor_kwargs": (None, PROMPT),
    "media_io_kwargs": (None, PROMPT),
    "kv_transfer_params": (None, "it steers the engine"),
    "ec_transfer_params": (None, "it steers the engine"),
    "vllm_xargs": (None, "it steers the engine"),
    "functions": (None, "it is deprecated; use tools"),
    "function_call": (None, "it is deprecated; use tool_choice"),
    "audio": (None, "responses are text"),
    "modalities": (["text"], "responses are text"),
    "web_search_options": (None, "the model has no web search; give it a tool"),
}
"""Name → (the value that asks for nothing, why any other is refused)."""

_BODY: Any = msgspec.defstruct(
    "ChatBody",
    [
        ("model", str),
        ("messages", list[dict[str, Any]]),
        *((name, kind | None, None) for name, kind in (PASSED | READ).items()),
        *((name, Any, None) for name in REFUSED),
    ],
)
_DECODER = msgspec.json.Decoder(_BODY)
_GUIDED = ("json", "regex", "choice", "grammar")
_TEMPLATE_ONLY = {"chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_CODES = {"context_overflow": "context_length_exceeded", "too_many_calls": "rate_limit_exceeded"}
"""OpenAI's own codes for two of ours, which programs act on; the others keep our name."""


class OpenAIChat:
    """``shown`` of its requests is whether the stream ends with the usage."""

    name = "openai.chat"

    def parse(self, content: bytes, model: str | None = None, streamed: bool = False) -> ModelRequest:
        body = decoded(_DECODER, content)
        check_left_out(body, REFUSED)
        tools, choice = checked_tools(body.tools or [], body.tool_choice)
        options = {name: value for name in PASSED if (value := getattr(body, name)) is not None}
        options |= _limits(body) | _constraints(body)
        if choice is not None:
            options["tool_choice"] = choice
        if not tools:
            options.pop("parallel_tool_calls", None)
        return ModelRequest(
            model=body.model,
            messages=checked_messages(body.messages),
            tools=tools,
            options=options,
            streamed=bool(body.stream),
            shown=bool((body.stream_options or {}).get("include_usage")),
        )

    def writer(self, request: ModelRequest, call_id: str) -> Writer:
        return ChatWriter(call_id, request.model, bool(request.shown))

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        if code == "context_overflow" and (sizes := overflow(message)):
            message = (
                f"This model's maximum context length is {sizes[1]} tokens. However, your messages resulted in "
                f"{sizes[0]} tokens. Please reduce the length of the messages."
            )
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        code = ERROR_CODES.get(code, code) if code else None
        return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})

    def count(self, tokens: int) -> bytes:
        return encode({"object": "chat.completion.input_tokens", "input_tokens": tokens})


class ChatWriter:
    """What is the same in each chunk is encoded once."""

    def __init__(self, call_id: str, model: str, include_usage: bool) -> None:
        self._ids = {"id": f"chatcmpl-{call_id}", "created": int(time.time()), "model": model}
        self._head = encode(self._ids | {"object": "chat.completion.chunk"})[:-1] + b',"choices":['
        self._delta_head = self._head + b'{"index":0,"delta":{'
        self._include_usage = include_usage
        self._called = False

    def start(self, prompt_tokens: int | None) -> bytes:
        return event(self._delta_head + b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}')

    def delta(self, delta: Delta) -> bytes:
        fields = []
        if delta.reasoning:
            fields.append(b'"reasoning_content":' + encode(delta.reasoning))
        if delta.content:
            fields.append(b'"content":' + encode(delta.content))
        if delta.tool_calls:
            self._called = True
            fields.append(b'"tool_calls":' + encode([_call_delta(call) for call in delta.tool_calls]))
        if not fields and not delta.logprobs:
            return b""
        logprobs = b'{"content":' + encode(delta.logprobs) + b',"refusal":null}' if delta.logprobs else b"null"
        return event(self._delta_head + b",".join(fields) + b'},"logprobs":' + logprobs + b',"finish_reason":null}]}')

    def end(self, ended: Ended) -> bytes:
        reason = encode(_reason(ended, self._called))
        events = event(self._delta_head + b'},"logprobs":null,"finish_reason":' + reason + b"}]}")
        if self._include_usage:
            events += event(self._head + b'],"usage":' + encode(_usage(ended.usage)) + b"}")
        return events + b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        return event(self._head + b"]}")

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """The status stands in the message: some programs know by that alone that they may try again."""
        if status >= 500:
            message = f"{status} {HTTPStatus(status).phrase}: {message}"
        return event(OpenAIChat().error(status, message, code=code))

    def whole(self, reply: Reply, ended: Ended) -> bytes:
        message = reply.message()
        if reply.content is None and not reply.tool_calls:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": reply.logprobs, "refusal": None} if reply.logprobs else None,
            "finish_reason": _reason(ended, bool(reply.tool_calls)),
        }
        return encode(self._ids | {"object": "chat.completion", "choices": [choice], "usage": _usage(ended.usage)})


def _reason(ended: Ended, called: bool) -> str:
    return "tool_calls" if called and ended.finish_reason == "stop" else ended.finish_reason


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.id is None and call.name is None:
        return {"index": call.index, "function": function}
    if call.name is not None:
        function = {"name": call.name} | function
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _limits(body: Any) -> dict[str, Any]:
    """Where a response ends, and how its log-probs are shown."""
    found: dict[str, Any] = {}
    if body.stop is not None and body.stop != []:
        found["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if "" in found["stop"]:
            raise BadRequest("stop: a stop string must not be empty", "stop")
    for name in ("max_tokens", "max_completion_tokens"):
        limit = getattr(body, name)
        if limit is not None:
            if limit < 1:
                raise BadRequest(f"{name} must be at least 1", name)
            found["max_tokens"] = limit
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= 20:
            raise BadRequest("top_logprobs must be from 0 to 20", "top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return found


def _constraints(body: Any) -> dict[str, Any]:
    """Older names of the engine's ``structured_outputs``, and of what the template is told about thinking."""
    found: dict[str, Any] = {}
    guided = {kind: value for kind in _GUIDED if (value := getattr(body, f"guided_{kind}")) is not None}
    if len(guided) > 1 or (guided and body.structured_outputs is not None):
        raise BadRequest("at most one of guided_* and structured_outputs may be given", f"guided_{next(iter(guided))}")
    if guided:
        if body.guided_whitespace_pattern is not None:
            guided["whitespace_pattern"] = body.guided_whitespace_pattern
        found["structured_outputs"] = guided
    told = body.chat_template_kwargs or {}
    if not_told := _TEMPLATE_ONLY & told.keys():
        raise BadRequest(f"chat_template_kwargs: {min(not_told)} must be left out: {PROMPT}", "chat_template_kwargs")
    if body.enable_thinking is not None:
        found["chat_template_kwargs"] = {"enable_thinking": body.enable_thinking} | told
    return found
