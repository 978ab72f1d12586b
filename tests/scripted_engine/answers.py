"""The bytes of what vLLM answers to a call that samples: what both endpoints share, and chat completions.

Key for key in vLLM's order. What a plan always gives is encoded once and remembered, so that the engine costs little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from scripted_engine.parsing import Delta, Told, difference, new_call_id, told, whole
from scripted_engine.plans import Fault
from scripted_engine.tokens import TRIPLES, Decoder, decode, logprob

FINGERPRINT = "scripted"
MISSING_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.encode


class Outcome(msgspec.Struct, frozen=True):
    """What was sampled: ``ids`` up to the end, why it ended there, and how tokens come together in chunks."""

    ids: tuple[int, ...]
    finish: str
    stop_reason: int | str | None
    per_chunk: int

    @property
    def ends(self) -> list[int]:
        """How many tokens there are after each chunk."""
        return [*range(self.per_chunk, len(self.ids), self.per_chunk), len(self.ids)]


class Asked(msgspec.Struct, frozen=True):
    """What of the request shapes the answer. ``top`` is None where no log-probs are wanted."""

    top: int | None
    ids: bool
    tools: bool = False
    thinks: bool = False
    stop: tuple[str, ...] = ()
    usage: bool = False
    usage_each: bool = False


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


def spoilt(
    fault: Fault | None, ids: Sequence[int], entries: list[Any] | None
) -> tuple[Sequence[int] | None, list[Any] | None]:
    """Ids and log-prob entries as ``fault`` leaves them."""
    kind = fault.kind if fault else None
    if kind == "no_ids":
        return None, entries
    if kind == "no_logprobs":
        return ids, None
    if kind == "short_logprobs":
        return ids, (entries or [])[:-1]
    if kind == "missing_logprob" and entries:
        return ids, [*entries[:-1], entries[-1] | {"logprob": MISSING_LOGPROB}]
    return ids, entries


def usage(prompt: int, completion: int, fault: Fault | None = None) -> dict[str, Any]:
    completion += bool(fault and fault.kind == "wrong_usage")
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def prompt_of(ids: list[int], fault: Fault | None) -> list[int]:
    return [*ids[:-1], ids[-1] ^ 1] if fault and fault.kind == "wrong_prompt" else ids


@lru_cache(maxsize=256)
def chat_entries(ids: tuple[int, ...], top: int) -> list[dict[str, Any]]:
    """``logprobs.content``: a token whose character is not complete yet has no text."""
    decoder = Decoder()
    return [_chat_entry(token, decoder.push([token]), top) for token in ids]


def _chat_entry(token: int, text: str, top: int) -> dict[str, Any]:
    others = [TRIPLES + token % 1000 + n for n in range(1, top)]
    return {
        "token": text,
        "logprob": logprob(token),
        "bytes": list(text.encode()),
        "top_logprobs": [
            {"token": said, "logprob": logprob(one), "bytes": list(said.encode())}
            for one, said in [(token, text), *((one, decode([one])) for one in others)][:top]
        ],
    }


def deltas(outcome: Outcome, asked: Asked) -> list[dict[str, Any]]:
    """What each chunk tells the client; {} where the text waits for more."""
    decoder, text, before, found = Decoder(control=False), "", Told("", "", []), []
    held = max((len(stop) - 1 for stop in asked.stop), default=0)
    known: list[str] = []
    start = 0
    for end in outcome.ends:
        text += decoder.push(outcome.ids[start:end])
        visible = text[: max(len(text) - held, len(before.content))] if held else text
        if end == len(outcome.ids):
            visible = cut_at(text, outcome.stop_reason)
        after = told(visible, tools=asked.tools, thinks=asked.thinks)
        found.append(_chat_delta(difference(before, after, known, ended=end == len(outcome.ids))))
        start, before = end, after
    return found


def _chat_delta(delta: Delta) -> dict[str, Any]:
    if not delta:
        return {}
    written: dict[str, Any] = {"reasoning": delta.reasoning} if delta.reasoning else {}
    if delta.content or delta.calls:
        written["content"] = delta.content or None
    return written | ({"tool_calls": delta.calls} if delta.calls else {})


def cut_at(text: str, stop: int | str | None) -> str:
    return text.partition(stop)[0] if isinstance(stop, str) else text


@lru_cache(maxsize=64)
def _remembered(outcome: Outcome, asked: Asked) -> list[bytes]:
    return _chat_choices(outcome, asked, None)


def _chat_choices(outcome: Outcome, asked: Asked, fault: Fault | None) -> list[bytes]:
    """The choice of each chunk; b"" for a chunk that is not sent."""
    entries = chat_entries(outcome.ids, asked.top) if asked.top is not None else None
    told_each = deltas(outcome, asked)
    called = any("tool_calls" in delta for delta in told_each)
    found, start = [], 0
    for delta, end in zip(told_each, outcome.ends, strict=True):
        last = end == len(outcome.ids)
        due = fault if fault and (start <= fault.after < end or (last and fault.after >= end)) else None
        ids, lines = spoilt(due, outcome.ids[start:end], entries[start:end] if entries is not None else None)
        finish = ("tool_calls" if called else outcome.finish) if last else None
        if fault and fault.kind == "no_finish":
            finish = None
        silent = not delta and not last and asked.top is None and not asked.ids
        found.append(b"" if silent else chat_choice(delta, lines, finish, outcome, ids if asked.ids else None, last))
        start = end
    return found


def chat_choice(
    delta: dict[str, Any],
    entries: list[Any] | None,
    finish: str | None,
    outcome: Outcome,
    ids: Sequence[int] | None,
    last: bool,
) -> bytes:
    logprobs = {"content": entries} if entries is not None else None
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    if last:
        choice["stop_reason"] = outcome.stop_reason
    return encode(choice | {"token_ids": ids})


class ChatAnswer:
    """``/v1/chat/completions``."""

    def __init__(
        self, call_id: str, model: str, prompt: list[int], outcome: Outcome, asked: Asked, fault: Fault | None
    ) -> None:
        self.call_id, self._model, self._prompt = call_id, model, prompt
        self.outcome, self._asked, self._fault = outcome, asked, fault
        self._calls_differ = asked.tools and "<tool_call>" in decode(outcome.ids)
        created = int(time.time())
        self._head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":"%b","choices":[' % (
            call_id.encode(),
            created,
            model.encode(),
        )

    def choices(self) -> list[bytes]:
        """Of each chunk; new where ids of calls are in it, or a fault."""
        if self._fault or self._calls_differ:
            return _chat_choices(self.outcome, self._asked, self._fault)
        return _remembered(self.outcome, self._asked)

    def opening(self) -> bytes:
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = encode(prompt_of(self._prompt, self._fault)) if self._asked.ids else b"null"
        return self._head + choice + self._usage(0) + b',"prompt_token_ids":%b,"prompt_text":null}\n\n' % prompt

    def event(self, choice: bytes, count: int, last: bool, spans: list[Span]) -> bytes:
        """The event of one chunk, after which ``count`` tokens are out."""
        if not choice:
            return b""
        fingerprint = b',"system_fingerprint":"%b"' % FINGERPRINT.encode() if last and not self._asked.usage else b""
        return self._head + choice + b"]" + self._usage(count) + fingerprint + b"}\n\n"

    def aborted(self, count: int, spans: list[Span]) -> bytes:
        outcome = msgspec.structs.replace(self.outcome, stop_reason=None)
        ids = () if self._asked.ids else None
        return self.event(chat_choice({}, None, "abort", outcome, ids, True), count, True, spans) + self.closing(count)

    def closing(self, count: int) -> bytes:
        if not self._asked.usage:
            return DONE
        said = encode(usage(len(self._prompt), count, self._fault))
        return self._head + b'],"usage":%b,"system_fingerprint":"%b"}\n\n' % (said, FINGERPRINT.encode()) + DONE

    def _usage(self, count: int) -> bytes:
        if not self._asked.usage_each:
            return b""
        return b',"usage":' + encode(usage(len(self._prompt), count) | {"completion_tokens_details": None})

    def whole(self, count: int, finish: str, spans: list[Span]) -> bytes:
        asked, fault, kept = self._asked, self._fault, self.outcome.ids[:count]
        message = whole(
            cut_at(decode(kept, control=False), self.outcome.stop_reason), tools=asked.tools, thinks=asked.thinks
        )
        entries = chat_entries(kept, asked.top) if asked.top is not None else None
        ids, entries = spoilt(fault, kept, entries)
        calls = [(new_call_id(), name, arguments) for name, arguments in message.calls]
        choice = {
            "index": 0,
            "message": message_body(message.content, message.reasoning, calls),
            "logprobs": {"content": entries} if entries is not None else None,
            "finish_reason": "tool_calls" if calls and finish != "abort" else finish,
            "stop_reason": self.outcome.stop_reason,
            "token_ids": ids if asked.ids else None,
            "routed_experts": None,
        }
        if fault and fault.kind == "no_finish":
            choice["finish_reason"] = None
        said = usage(len(self._prompt), count, fault)
        prompt = prompt_of(self._prompt, fault) if asked.ids else None
        return completion(self.call_id, self._model, [choice], said, prompt, FINGERPRINT)


def message_body(content: str | None, reasoning: str | None, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """A whole assistant message; ``calls`` are (id, name, arguments)."""
    body: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if calls:
        body["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return body | {"reasoning": reasoning}


def completion(
    call_id: str,
    model: str,
    choices: list[dict[str, Any]],
    said: dict[str, Any],
    prompt: list[int] | None,
    fingerprint: str | None,
) -> bytes:
    body = {
        "id": call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": said | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return encode(body)
