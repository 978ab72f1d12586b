"""What a request is for, from its method, path, query and headers. Pure; it never raises.

A session's token stands in the path (``/s/TOKEN/…``), or is the API key of a program that can be given nothing else.
Programs differ in what they put between the base URL and the operation, so slashes and the version may be missing or
doubled. What there is not (completions, embeddings, files …) is refused in the shape of the dialect that the path
suggests, and never taken for chat.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

import msgspec

Operation = Literal["sample", "count", "models", "hello"]
Headers = Mapping[bytes, bytes] | Mapping[str, str]
"""Names in lower case, as ASGI gives them."""

CHAT, MESSAGES, RESPONSES, GOOGLE = "openai.chat", "anthropic.messages", "openai.responses", "google.generate"

VERSIONS = frozenset({"v1", "v1beta", "v1beta1", "v1alpha"})
POSTS: dict[tuple[str, ...], tuple[str, Operation]] = {
    ("chat", "completions"): (CHAT, "sample"),
    ("messages",): (MESSAGES, "sample"),
    ("messages", "count_tokens"): (MESSAGES, "count"),
    ("responses",): (RESPONSES, "sample"),
}
GOOGLE_OPERATIONS: dict[str, Operation] = {
    "generateContent": "sample",
    "streamGenerateContent": "sample",
    "countTokens": "count",
}
SUGGESTED = {
    "messages": MESSAGES,
    "complete": MESSAGES,
    "api": MESSAGES,
    "responses": RESPONSES,
    "interactions": GOOGLE,
}
"""The dialect of a path that we do not have, by its first word."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")


class Target(msgspec.Struct, frozen=True):
    """``token`` is unverified; None only where an operation needs none. ``model`` and ``streamed`` are what the URL
    says, for the dialect that has them there. ``dialect`` is its ``name``."""

    token: str | None
    dialect: str
    operation: Operation
    model: str | None = None
    streamed: bool = False
    array: bool = False
    """Google's stream as one JSON array, which is what it is without ``alt=sse``."""


class Refusal(msgspec.Struct, frozen=True):
    """An error response in the shape of ``dialect``."""

    status: int
    dialect: str
    code: str
    message: str


def resolve(method: str, path: str, query: str, headers: Headers) -> Target | Refusal:
    """``path`` may be percent-encoded or not.

    >>> resolve("POST", "/s/TOKEN/v1//chat/completions", "", {})
    Target(token='TOKEN', dialect='openai.chat', operation='sample', model=None, streamed=False)
    """
    words = [word for word in unquote(path).split("/") if word]
    token = words[1] if len(words) > 1 and words[0] == "s" else None
    words = words[2:] if token else words
    version, words = _without_version(words)
    found = _operation(method, words, version, headers)
    if _header(headers, "upgrade").lower() == "websocket":
        return Refusal(426, found.dialect, "upgrade_required", "WebSocket is not served here: send a POST")
    if isinstance(found, Refusal):
        return found
    if found.streamed and "sse" not in parse_qs(query).get("alt", []):
        found = msgspec.structs.replace(found, array=True)
    return _with_token(found, token, _keys(query, headers))


def _without_version(words: list[str]) -> tuple[str, list[str]]:
    """The version that the path names, Google's own before ``v1``, and what stands after it."""
    count = 0
    while count < len(words) and words[count] in VERSIONS:
        count += 1
    return max(words[:count], default="", key=len), words[count:]


def _operation(method: str, words: list[str], version: str, headers: Headers) -> Target | Refusal:
    """Without the token."""
    reading = method in ("GET", "HEAD")
    if not words or words == ["api", "hello"]:
        dialect = MESSAGES if words else _suggested(words, version, headers)
        return Target(None, dialect, "hello") if reading else _wrong_method(method, "", dialect, "GET")
    if (known := POSTS.get(tuple(words))) is not None:
        dialect, operation = known
        return Target(None, dialect, operation) if method == "POST" else _wrong_method(method, words, dialect, "POST")
    if words[0] == "models":
        return _models(method, words, version)
    return _not_found(method, words, _suggested(words, version, headers))


def _models(method: str, words: list[str], version: str) -> Target | Refusal:
    """``models``, ``models/M`` and Google's ``models/M:operation``; M may hold slashes and colons."""
    name, colon, verb = "/".join(words[1:]).rpartition(":")
    if colon and verb in GOOGLE_OPERATIONS and name:
        if method != "POST":
            return _wrong_method(method, words, GOOGLE, "POST")
        return Target(None, GOOGLE, GOOGLE_OPERATIONS[verb], name, verb.startswith("stream"))
    dialect = GOOGLE if len(version) > len("v1") else CHAT
    if method in ("GET", "HEAD"):
        return Target(None, dialect, "models", "/".join(words[1:]) or None)
    if colon and name:
        return _not_found(method, words, GOOGLE)
    return _wrong_method(method, words, dialect, "GET")


def _suggested(words: list[str], version: str, headers: Headers) -> str:
    """The dialect of a path that has none of its own: by its first word, its version, then the program's headers."""
    first = words[0] if words else ""
    if first in SUGGESTED:
        return SUGGESTED[first]
    if len(version) > len("v1") or _header(headers, "x-goog-api-key"):
        return GOOGLE
    if _header(headers, "anthropic-version"):
        return MESSAGES
    return CHAT


def _not_found(method: str, words: list[str], dialect: str) -> Refusal:
    return Refusal(404, dialect, "not_found", f"there is no {_shown(method, words)} here")


def _wrong_method(method: str, words: Any, dialect: str, right: str) -> Refusal:
    return Refusal(405, dialect, "method_not_allowed", f"{_shown(method, words)} is not served: use {right}")


def _shown(method: str, words: Any) -> str:
    """Cut short: it goes into an error message."""
    return f"{method[:16]} /{'/'.join(words)[:120]}"


def _with_token(target: Target, token: str | None, keys: list[str]) -> Target | Refusal:
    """The path's token wins, but not over a key that says that the program belongs to another session."""
    if token is None:
        token = next(filter(_about, keys), keys[0] if keys else None)
    elif any(_disagrees(key, token) for key in keys):
        message = "the API key is the token of another session than the one in the URL: give the program one of them"
        return Refusal(401, target.dialect, "invalid_session_token", message)
    if token is None and target.operation in ("sample", "count"):
        message = "no session token: use the base URL /s/TOKEN, or the token as API key"
        return Refusal(401, target.dialect, "invalid_session_token", message)
    return msgspec.structs.replace(target, token=token)


def _keys(query: str, headers: Headers) -> list[str]:
    """The API keys that came, in the order in which they count."""
    scheme, _, bearer = _header(headers, "authorization").partition(" ")
    keys = [bearer.strip()] if scheme.lower() == "bearer" else []
    keys += [_header(headers, name).strip() for name in KEY_HEADERS]
    if "key=" in query:
        keys += parse_qs(query).get("key", [])
    return [key for key in keys if key]


def _disagrees(key: str, token: str) -> bool:
    return key != token and (about := _about(key)) is not None and about != _about(token)


def _about(key: str) -> tuple[str, int] | None:
    """Session and attempt that a key says it is for, unverified; None for what is no token of ours."""
    parts = key.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=="), type=_Claims)
    except (ValueError, binascii.Error, RecursionError):
        return None
    return claims.sid, claims.att


class _Claims(msgspec.Struct):
    sid: str
    att: int


def _header(headers: Any, name: str) -> str:
    """Its value, or the empty text."""
    value = headers.get(name.encode())
    if value is not None:
        return value.decode("latin-1")
    return headers.get(name) or ""
