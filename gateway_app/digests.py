"""Digests of conversations: what makes two histories the same, although a program has rewritten them.

Programs move cache marks, turn a string into one text block, write tool arguments anew and drop reasoning. So messages
are compared after normalising: texts joined, blank ones and reasoning and ids left out, arguments parsed. Arguments
that are no JSON object count as ``{}``: that is what some programs send back in their place.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

SHAPING = ("chat_template_kwargs", "chat_template", "reasoning_effort", "documents", "continue_final_message")
"""Options that change how a template renders the same messages."""

EXACT_BYTES = 8
_encode = msgspec.json.Encoder(order="deterministic").encode


class Conversation(msgspec.Struct, frozen=True):
    """A request's history. ``chain[i]`` stands for the tools and the first i messages; ``exact`` has EXACT_BYTES of
    digest for each message as it was sent.
    """

    chain: list[bytes]
    exact: bytes

    def equal_messages(self, other: bytes) -> int:
        """How many leading messages are the same, byte for byte, as those of the exact digests ``other``."""
        n = min(len(self.exact), len(other)) // EXACT_BYTES
        if self.exact[: n * EXACT_BYTES] == other[: n * EXACT_BYTES]:
            return n
        same = 0
        while self.exact.startswith(other[: (same + 1) * EXACT_BYTES]):
            same += 1
        return same


def conversation(messages: list[dict[str, Any]], tools: list[Any], options: dict[str, Any]) -> Conversation:
    shaping = [options.get(name) for name in SHAPING]
    link = _digest(_encode([tools, options.get("tool_choice") == "none", shaping]))
    chain = [link]
    for message in messages:
        link = extended(link, message)
        chain.append(link)
    return Conversation(chain, b"".join(exact(message) for message in messages))


def extended(link: bytes, message: dict[str, Any]) -> bytes:
    """The chain's next digest, after ``message``."""
    return _digest(link + _encode(_normalised(message)))


def exact(message: dict[str, Any]) -> bytes:
    return blake2b(_encode(message), digest_size=EXACT_BYTES).digest()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _normalised(message: dict[str, Any]) -> list[Any]:
    calls = [_call(call.get("function") or {}) for call in message.get("tool_calls") or []]
    return [message.get("role"), _content(message.get("content")), calls]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content if isinstance(content, str) and content.strip() else ""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if all(isinstance(text, str) for text in texts):
        return _content("".join(text for text in texts if text))
    return [_unmarked(part) for part in content]


def _unmarked(part: Any) -> Any:
    return {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part


def _call(function: dict[str, Any]) -> list[Any]:
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        arguments = {}
    return [function.get("name"), arguments if isinstance(arguments, dict) else {}]
