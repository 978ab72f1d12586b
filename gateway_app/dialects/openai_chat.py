"""OpenAI Chat Completions, as agent programs speak it and vLLM understands it.

The request goes to the engine as it came, but for the model's name. What the engine returns is cleaned of nulls and of
what only the engine's own clients know. A keep-alive is a chunk without choices: some clients do not count comments.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class BadRequest(ValueError):
    """A body that is no chat request of one choice. ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``body`` is the whole request, with fields of any name."""

    model: str
    messages: list[Any]
    tools: list[Any]
    streamed: bool
    include_usage: bool
    logprobs: bool
    body: dict[str, Any]

    def for_engine(self, served_model: str) -> dict[str, Any]:
        """Whatever name the agent program uses, there is one policy."""
        return self.body | {"model": served_model}


class OpenAIChat:
    """Writes the bodies and events of one response: ``call_id`` and ``model`` stand in each."""

    name = "openai.chat"

    def __init__(self, call_id: str, model: str) -> None:
        self._head = {"id": f"chatcmpl-{call_id}", "created": int(time.time()), "model": model}

    @staticmethod
    def parse(content: bytes) -> ChatRequest:
        """Raises BadRequest."""
        try:
            body = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise BadRequest("messages must be a list", "messages")
        if not isinstance(body.get("model"), str):
            raise BadRequest("model must be a string", "model")
        if body.get("n") not in (None, 1):
            raise BadRequest("n must be 1: one response is sampled a call", "n")
        tools, options = body.get("tools"), body.get("stream_options")
        if not isinstance(tools, list | None):
            raise BadRequest("tools must be a list", "tools")
        return ChatRequest(
            model=body["model"],
            messages=body["messages"],
            tools=tools or [],
            streamed=bool(body.get("stream")),
            include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            logprobs=bool(body.get("logprobs")),
            body=body,
        )

    @staticmethod
    def error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})

    def whole(self, message: dict[str, Any], finish_reason: str, logprobs: Any, usage: dict[str, Any]) -> bytes:
        """``logprobs`` are in OpenAI's shape, or None."""
        shown = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        return msgspec.json.encode(self._head | {"object": "chat.completion", "choices": [shown], "usage": usage})

    def delta(self, delta: dict[str, Any]) -> bytes:
        return self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def finish(self, finish_reason: str, usage: dict[str, Any] | None) -> bytes:
        """The terminal events: the reason, the usage if it was asked for, ``[DONE]``."""
        events = self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
        if usage is not None:
            events += self._event({"choices": [], "usage": usage})
        return events + b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        return self._event({"choices": []})

    def stream_error(self, message: str, code: str | None) -> bytes:
        """For a response whose headers are gone: the client sees an error, and no end."""
        return b"data: " + self.error(502, message, code=code) + b"\n\n"

    def _event(self, content: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(self._head | {"object": "chat.completion.chunk"} | content) + b"\n\n"


def clean_message(message: dict[str, Any]) -> dict[str, Any]:
    """A whole assistant message of the engine, or a delta of one, without what is null or empty.

    ``reasoning`` becomes ``reasoning_content``, the name that agent programs read and send back.
    """
    clean = {name: message[name] for name in ("role", "content") if message.get(name) is not None}
    if message.get("reasoning"):
        clean["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        clean["tool_calls"] = [_without_nulls(call) for call in message["tool_calls"]]
    return clean


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(item) if isinstance(item, dict) else item
        for name, item in value.items()
        if item is not None
    }


class StreamedMessage:
    """The assistant message that the deltas of a stream add up to."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._tool_calls: list[dict[str, Any]] = []

    def add(self, delta: dict[str, Any]) -> None:
        """Takes a cleaned delta."""
        for name in ("content", "reasoning_content"):
            if name in delta:
                self._texts[name] = self._texts.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", []):
            index = piece.get("index", 0)
            while len(self._tool_calls) <= index:
                self._tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self._tool_calls[index]
            call["id"] = call["id"] or piece.get("id", "")
            for name in ("name", "arguments"):
                call["function"][name] += piece.get("function", {}).get(name, "")

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._texts.get("content")}
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return message
