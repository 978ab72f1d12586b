"""Anthropic's Messages API.

A stream is ``message_start``, ``ping``, the blocks, ``message_delta``, ``message_stop``. A block is closed before the
next one opens. Only a tool call whose arguments are not yet a whole JSON object stays open beside what follows, so that
nothing is lost if the engine goes on with it; what comes for a call that is closed is dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway_app.dialects.anthropic_request import UNPARSED, parse_request
from gateway_app.dialects.dialect import Delta, Ended, ModelRequest, Reply, ToolCall, ToolCallDelta, Usage

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal", "stop": "end_turn"}

GROWTH = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class AnthropicMessages:
    name = "anthropic.messages"

    def parse(self, content: bytes, model: str | None = None, streamed: bool = False) -> ModelRequest:
        return parse_request(content, model, streamed)

    def writer(self, request: ModelRequest, call_id: str) -> MessageWriter:
        return MessageWriter(request.model, call_id)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return msgspec.json.encode(error_body(status, message, code))

    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})


class MessageWriter:
    """Of one response."""

    def __init__(self, model: str, call_id: str) -> None:
        self._head = {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}
        self._signature = call_id
        self._blocks = 0
        self._open: str | None = None
        """The type of the block of text or thinking that is open; it is the newest one."""
        self._calls: dict[int, _OpenCall] = {}

    def start(self, prompt_tokens: int | None) -> bytes:
        usage = _usage(Usage(prompt=prompt_tokens or 0, completion=0))
        message: dict[str, Any] = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", {"message": message}) + _event("ping", {})

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        for piece in delta.tool_calls:
            events += self._grow_call(piece)
        return events

    def end(self, ended: Ended) -> bytes:
        events = b"" if self._blocks else self._grow("text", "")
        events += self._close() + b"".join(_stop(call.block) for call in self._calls.values() if not call.closed)
        told = _stop_fields(ended, [call.arguments() for call in self._calls.values()])
        events += _event("message_delta", {"delta": told, "usage": _usage(ended.usage)})
        return events + _event("message_stop", {})

    def keep_alive(self) -> bytes:
        """A ping, which programs skip wherever it comes, and in an open text or thinking also an empty piece of it.

        Claude Code gives up after 600 s of pings alone; a delta, even an empty one, counts as life.
        """
        return _event("ping", {}) + (self._grow(self._open, "") if self._open else b"")

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        return _event("error", error_body(status, message, code))

    def whole(self, reply: Reply, ended: Ended) -> bytes:
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": self._signature})
        if reply.content or not (blocks or reply.tool_calls):
            blocks.append({"type": "text", "text": reply.content or ""})
        blocks += [_tool_use(call) for call in reply.tool_calls]
        told = _stop_fields(ended, [call.arguments for call in reply.tool_calls])
        return msgspec.json.encode(self._head | {"content": blocks} | told | {"usage": _usage(ended.usage)})

    def _grow(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            events = self._close() + self._start_block({"type": kind} | empty)
            self._open = kind
        delta, name = GROWTH[kind]
        return events + _growth(self._blocks - 1, {"type": delta, name: text})

    def _grow_call(self, piece: ToolCallDelta) -> bytes:
        call = self._calls.get(piece.index)
        events = b""
        if call is None:
            events = self._close()
            events += self._start_block({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            call = self._calls[piece.index] = _OpenCall(self._blocks - 1)
        if not piece.arguments or call.closed:
            return events
        call.pieces.append(piece.arguments)
        return events + _growth(call.block, {"type": "input_json_delta", "partial_json": piece.arguments})

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _close(self) -> bytes:
        """Closes what may be closed, before a block opens."""
        events = b""
        if self._open:
            if self._open == "thinking":
                events = _growth(self._blocks - 1, {"type": "signature_delta", "signature": self._signature})
            events += _stop(self._blocks - 1)
            self._open = None
        for call in self._calls.values():
            if not call.closed and _is_object(call.arguments()):
                call.closed = True
                events += _stop(call.block)
        return events


class _OpenCall:
    """A tool call in a stream: the number of its block, and the arguments that have come."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.pieces: list[str] = []
        self.closed = False

    def arguments(self) -> str:
        return "".join(self.pieces)


def error_body(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Programs know by its beginning that the prompt is too long, and compact."""
    if code == "context_overflow" and not message.startswith("prompt is too long"):
        message = f"prompt is too long: {message}"
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name} | fields))


def _growth(block: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", {"index": block, "delta": delta})


def _stop(block: int) -> bytes:
    return _event("content_block_stop", {"index": block})


def _usage(usage: Usage) -> dict[str, int]:
    """``input_tokens`` are those that came from no cache: a program adds the three up."""
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _stop_fields(ended: Ended, calls: list[str]) -> dict[str, Any]:
    """A forced tool call ends with "stop" at the engine; a call that a stop string cut short must not run."""
    reason, sequence = STOP_REASONS[ended.finish_reason], None
    if ended.finish_reason in ("stop", "tool_calls"):
        cut = ended.stop_sequence is not None and not (calls and all(map(_is_object, calls)))
        if cut:
            reason, sequence = "stop_sequence", ended.stop_sequence
        elif calls:
            reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_object(arguments: str) -> bool:
    return _object(arguments) is not None


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Arguments that are an object stay as they were sampled, to the letter."""
    text = call.arguments
    value = _object(text)
    if not text:
        shown: Any = {}
    elif value is not None and UNPARSED not in value:
        shown = msgspec.Raw(text.encode())
    else:
        shown = {UNPARSED: {"raw": text, "len": len(text.encode("utf-16-le")) // 2}}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": shown}
