"""Writes a response of the Responses API, streamed or whole.

Items come one after the other, in the order in which they were begun, each closed before the next one is added. A tool
call whose arguments are not yet a whole JSON object holds back what was begun after it, so that nothing is lost if the
engine goes on with it; what comes for an item that is closed is dropped. The last call is closed with the response: of
a response that fails, a program runs as little as it can. A custom call's input is written when it is whole.

The request's instructions and tools are not repeated in the response.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway_app.dialects.dialect import Delta, Ended, FinishReason, Reply, ToolCall, Usage
from gateway_app.dialects.responses_input import item_id, sealed
from gateway_app.dialects.responses_tools import Named, custom_input
from gateway_app.dialects.wire import encode, event

Object = dict[str, Any]

FAILURES = {"context_overflow": "context_length_exceeded", "too_many_calls": "rate_limit_exceeded"}
INCOMPLETE: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
TEXT_EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class Shown(msgspec.Struct, frozen=True):
    """What the writer needs of a request. ``settings`` are repeated; ``named`` is by the function's name."""

    settings: Object = {}
    named: dict[str, Named] = {}
    logprobs: bool = False


class ResponseWriter:
    def __init__(self, model: str, call_id: str, shown: Shown) -> None:
        self._shown = shown
        self._call_id = call_id
        self._head: Object = {"id": f"resp_{call_id}", "object": "response", "created_at": int(time.time())}
        about: Object = {"model": model, "instructions": None, "tools": [], "previous_response_id": None}
        self._tail = about | {"store": False, "truncation": "disabled", "metadata": {}} | shown.settings
        self._sequence = 0
        self._items: list[_Item] = []
        self._at = -1
        """The place of the item that is open; those behind it are held back."""
        self._last: dict[str | int, _Item] = {}
        """Calls by their index; the newest item of text and of reasoning."""

    def start(self, prompt_tokens: int | None) -> bytes:
        return b"" if self._sequence else self._created()

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._grow_text("reasoning", delta.reasoning, None)
        if delta.content:
            events += self._grow_text("message", delta.content, delta.logprobs)
        for piece in delta.tool_calls:
            call = self._last.get(piece.index)
            if call is None:
                call = self._call(ToolCall(id=piece.id or "", name=piece.name or "", arguments=""))
                self._last[piece.index] = call
                events += self._advance()
            events += self._grow(call, piece.arguments, None)
        return events

    def end(self, ended: Ended) -> bytes:
        if not _has_answer(self._items):
            self._add("message")
        events = self._advance(ended=True) + self._close(self._items[-1], _status(ended))
        fields = self._response(_status(ended), ended, [item.done for item in self._items])
        return events + self._event(f"response.{_status(ended)}", {"response": fields})

    def keep_alive(self) -> bytes:
        """The first one opens the response: programs may take nothing before ``response.created``."""
        return self._event("response.in_progress", {"response": self._begun()}) if self._sequence else self._created()

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """Programs ask again after most codes; ``invalid_prompt`` is for what would fail again."""
        known = FAILURES.get(code or "") or ("invalid_prompt" if status < 500 else "server_error")
        fields = self._begun() | {"status": "failed", "error": {"code": known, "message": message}}
        events = b"" if self._sequence else self._created()
        return events + self._event("response.failed", {"response": fields})

    def whole(self, reply: Reply, ended: Ended) -> bytes:
        if reply.reasoning:
            self._add("reasoning").pieces.append(reply.reasoning)
        if reply.content or not reply.tool_calls:
            item = self._add("message")
            item.pieces.append(reply.content or "")
            item.logprobs += (reply.logprobs or []) if self._shown.logprobs else []
        for call in reply.tool_calls:
            self._call(call).pieces.append(call.arguments)
        output = [item.as_done("completed") for item in self._items[:-1]] + [self._items[-1].as_done(_status(ended))]
        return encode(self._response(_status(ended), ended, output))

    def _created(self) -> bytes:
        fields = {"response": self._begun()}
        return self._event("response.created", fields) + self._event("response.in_progress", fields)

    def _begun(self) -> Object:
        about: Object = {
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return self._head | about | self._tail

    def _response(self, status: str, ended: Ended, output: list[Object]) -> Object:
        reason = INCOMPLETE.get(ended.finish_reason)
        details = {"reason": reason} if reason else None
        about = {"status": status, "error": None, "incomplete_details": details, "output": output}
        return self._head | about | self._tail | {"usage": _usage(ended.usage)}

    def _add(self, kind: str, call: ToolCall | None = None, named: Named | None = None) -> _Item:
        self._items.append(_Item(kind, self._call_id, len(self._items), call, named))
        return self._items[-1]

    def _call(self, call: ToolCall) -> _Item:
        named = self._shown.named.get(call.name) or Named(name=call.name)
        return self._add("custom_tool_call" if named.custom else "function_call", call, named)

    def _grow_text(self, kind: str, text: str, logprobs: list[Object] | None) -> bytes:
        events = b""
        if not self._items or self._items[-1].kind != kind:
            self._add(kind)
            events = self._advance()
        return events + self._grow(self._items[-1], text, logprobs if self._shown.logprobs else None)

    def _grow(self, item: _Item, text: str, logprobs: list[Object] | None) -> bytes:
        if not text or item.place < self._at:
            return b""
        item.pieces.append(text)
        if logprobs:
            item.logprobs += logprobs
        if item.place > self._at:
            return b""
        return self._growth(item, text, logprobs) + self._advance()

    def _advance(self, ended: bool = False) -> bytes:
        """Closes the open item where the next one may begin. ``ended``: nothing grows any more."""
        events = b""
        while self._at + 1 < len(self._items) and (self._at < 0 or ended or self._items[self._at].is_whole()):
            if self._at >= 0:
                events += self._close(self._items[self._at], "completed")
            self._at += 1
            events += self._open(self._items[self._at])
        return events

    def _open(self, item: _Item) -> bytes:
        events = self._event("response.output_item.added", {"output_index": item.place, "item": item.as_added()})
        if item.kind in TEXT_EVENTS:
            events += self._event(
                "response.content_part.added", item.at() | {"content_index": 0, "part": item.part("")}
            )
        held = item.text()
        return events + (self._growth(item, held, item.logprobs) if held else b"")

    def _growth(self, item: _Item, text: str, logprobs: list[Object] | None) -> bytes:
        if item.kind == "custom_tool_call":
            return b""
        told = b',"logprobs":' + encode(logprobs or []) if item.kind == "message" else b""
        self._sequence += 1
        return item.name_line + event(
            b'%b%b%b,"sequence_number":%d}' % (item.growth_head, encode(text), told, self._sequence - 1)
        )

    def _close(self, item: _Item, status: str) -> bytes:
        at, text = item.at(), item.text()
        item.done = item.as_done(status)
        if item.kind in TEXT_EVENTS:
            at["content_index"] = 0
            told = {"text": text, "logprobs": item.logprobs} if item.kind == "message" else {"text": text}
            events = self._event(f"{TEXT_EVENTS[item.kind]}.done", at | told)
            events += self._event("response.content_part.done", at | {"part": item.part(text)})
        elif item.kind == "function_call":
            told = {"name": item.done["name"], "arguments": text}
            events = self._event("response.function_call_arguments.done", at | told)
        else:
            events = self._event("response.custom_tool_call_input.delta", at | {"delta": item.done["input"]})
            events += self._event("response.custom_tool_call_input.done", at | {"input": item.done["input"]})
        return events + self._event("response.output_item.done", {"output_index": item.place, "item": item.done})

    def _event(self, name: str, fields: Object) -> bytes:
        self._sequence += 1
        data = encode({"type": name, "sequence_number": self._sequence - 1} | fields)
        return b"event: %b\n" % name.encode() + event(data)


class _Item:
    """An item of the output. ``kind`` is its type."""

    def __init__(self, kind: str, call_id: str, place: int, call: ToolCall | None, named: Named | None) -> None:
        self.kind = kind
        self.place = place
        self.pieces: list[str] = []
        self.logprobs: list[Object] = []
        self.done: Object = {}
        self._call_id = call_id
        self._head: Object = {"id": item_id(PREFIXES[kind], call_id, place), "type": kind}
        if call and named:
            self._head |= {"call_id": call.id, "name": named.name}
            self._head |= {"namespace": named.namespace} if named.namespace else {}
        name = f"{TEXT_EVENTS[kind]}.delta" if kind in TEXT_EVENTS else "response.function_call_arguments.delta"
        self.name_line = b"event: %b\n" % name.encode()
        index = {"content_index": 0} if kind in TEXT_EVENTS else {}
        self.growth_head = encode({"type": name} | self.at() | index)[:-1] + b',"delta":'

    def text(self) -> str:
        return "".join(self.pieces)

    def at(self) -> Object:
        return {"item_id": self._head["id"], "output_index": self.place}

    def part(self, text: str) -> Object:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}

    def is_whole(self) -> bool:
        """Whether the next item may begin."""
        if self.kind in TEXT_EVENTS:
            return True
        try:
            return isinstance(msgspec.json.decode(self.text()), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def as_added(self) -> Object:
        if self.kind == "reasoning":
            return self._head | {"summary": [], "content": [], "status": "in_progress"}
        if self.kind == "message":
            return self._head | {"role": "assistant", "content": [], "status": "in_progress"}
        empty = {"arguments": ""} if self.kind == "function_call" else {"input": ""}
        return self._head | empty | {"status": "in_progress"}

    def as_done(self, status: str) -> Object:
        text = self.text()
        if self.kind == "reasoning":
            told: Object = {"summary": [], "content": [self.part(text)]}
            told["encrypted_content"] = sealed(self._call_id, text)
        elif self.kind == "message":
            told = {"role": "assistant", "content": [self.part(text)]}
        elif self.kind == "function_call":
            told = {"arguments": text}
        else:
            told = {"input": custom_input(text)}
        return self._head | told | {"status": status}


def _has_answer(items: list[_Item]) -> bool:
    """A response of reasoning alone, or of nothing, gets an empty text: histories keep it as a turn."""
    return any(item.kind != "reasoning" for item in items)


def _status(ended: Ended) -> str:
    return "incomplete" if ended.finish_reason in INCOMPLETE else "completed"


def _usage(usage: Usage) -> Object:
    """The engine does not tell how many tokens were reasoning."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
