"""vLLM's Hermes parser, whole and piece by piece, and a parser of ``<think>`` where the engine has one.

What a text has given so far depends on the text alone, not on how it was cut. So a new piece gives the difference
between what the text gives with it and without it.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
CALLS = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class Message(msgspec.Struct, frozen=True):
    """``calls`` are (name, arguments as text)."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, str]]


def whole(text: str, *, tools: bool, thinks: bool) -> Message:
    """The message of a complete reply. Calls that are no JSON stay in the content."""
    thought, _, rest = _thought(text) if thinks else ("", True, text)
    if not tools or OPEN not in rest:
        return Message(rest if rest or not thought else None, thought or None, [])
    try:
        calls = [_call(match[0] or match[1]) for match in CALLS.findall(rest)]
    except (ValueError, KeyError, TypeError):
        return Message(rest, thought or None, [])
    return Message(rest[: rest.index(OPEN)] or None, thought or None, calls)


def _call(text: str) -> tuple[str, str]:
    value = json.loads(text)
    return value["name"], json.dumps(value["arguments"], ensure_ascii=False)


class Told(msgspec.Struct, frozen=True):
    """What a client has been told of a text that is still growing."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def told(text: str, *, tools: bool, thinks: bool) -> Told:
    thought, ended, rest = _thought(text) if thinks else ("", True, text)
    if not ended:
        return Told(thought, "", [])
    if not tools:
        return Told(thought, rest, [])
    if OPEN not in rest:
        return Told(thought, rest[: len(rest) - _overlap(rest, OPEN)], [])
    calls = []
    for body, complete in _bodies(rest):
        name = NAME.search(body)
        if name is None:
            break
        calls.append((name[1], _arguments(body, complete)))
    return Told(thought, rest[: rest.index(OPEN)], calls)


def _thought(text: str) -> tuple[str, bool, str]:
    """(the thought, whether it is over, what follows it)."""
    if not text.startswith(THINK):
        opening = THINK.startswith(text) and text != ""
        return "", not opening, text
    inner = text[len(THINK) :]
    thought, end, rest = inner.partition(THOUGHT)
    if not end:
        return inner[: len(inner) - _overlap(inner, THOUGHT)], False, ""
    return thought, True, rest


def _bodies(text: str) -> list[tuple[str, bool]]:
    found, at = [], 0
    while (start := text.find(OPEN, at)) != -1:
        start += len(OPEN)
        end = text.find(CLOSE, start)
        if end == -1:
            raw = text[start:]
            body = raw[: len(raw) - _overlap(raw, CLOSE)].strip()
            return [*found, (body, _is_json(body))]
        found.append((text[start:end].strip(), True))
        at = end + len(CLOSE)
    return found


def _arguments(body: str, complete: bool) -> str:
    match = ARGUMENTS.search(body)
    if match is None:
        return ""
    raw = body[match.end() :]
    return raw.rstrip().removesuffix("}").rstrip() if complete else raw


def _is_json(text: str) -> bool:
    if not text.endswith("}"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _overlap(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


class Delta(msgspec.Struct, frozen=True):
    """What is new. A call that begins has an id and a name; arguments come after it, or later."""

    reasoning: str
    content: str
    calls: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


def new_call_id() -> str:
    return f"chatcmpl-tool-{os.urandom(8).hex()}"


def difference(before: Told, after: Told, known_ids: list[str], *, ended: bool) -> Delta:
    """The delta from ``before`` to ``after``. A call that begins gets the next of ``known_ids``, or a new id there.

    A call without arguments gets ``{}`` only where its name comes with the end of the text: so does vLLM.
    """
    calls: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(after.calls):
        sent = before.calls[index][1] if index < len(before.calls) else ""
        if index >= len(before.calls):
            if index >= len(known_ids):
                known_ids.append(new_call_id())
            calls.append({"id": known_ids[index], "type": "function", "index": index, "function": {"name": name}})
        if len(arguments) > len(sent):
            calls.append({"index": index, "function": {"arguments": arguments[len(sent) :]}})
    if ended and calls and not after.calls[-1][1]:
        calls[-1]["function"]["arguments"] = "{}"
    return Delta(after.reasoning[len(before.reasoning) :], after.content[len(before.content) :], calls)
