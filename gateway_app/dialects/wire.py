"""What dialects share on the wire: a body's decoding, an event's framing, the numbers of a context overflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway_app.dialects.dialect import BadRequest

encode = msgspec.json.Encoder().encode

DEEPEST = 128
"""Levels of JSON. What a request holds is written and read again elsewhere, maybe further down the stack."""

TOO_DEEP = f"the body is nested deeper than {DEEPEST} levels"

_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_OVERFLOW = re.compile(r"(\d+) tokens > (\d+) maximum")


def check_left_out(body: Any, refused: Mapping[str, tuple[Any, str]]) -> None:
    """Raises BadRequest for the first field of ``refused`` that is not left out or neutral, with the reason."""
    for name, (neutral, reason) in refused.items():
        value = getattr(body, name)
        if value is not None and value != neutral:
            raise BadRequest(f"{name} must be left out: {reason}", name)


def decoded(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    """Raises BadRequest for what is not JSON, or not of the decoder's type; ``param`` is then the field's path."""
    try:
        found = decoder.decode(content)
    except msgspec.ValidationError as error:
        raise _not_of_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest(TOO_DEEP) from None
    try:
        too_deep = len(content) > 2 * DEEPEST and deeper(found, DEEPEST)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        too_deep = True
    if too_deep:
        raise BadRequest(TOO_DEEP)
    return found


def deeper(value: Any, limit: int) -> bool:
    """Whether there is anything below ``limit`` levels of lists and objects; also in what is not decoded yet."""
    level = [value]
    for _ in range(limit + 1):
        inside: list[Any] = []
        for found in level:
            item = msgspec.json.decode(found) if type(found) is msgspec.Raw else found
            kind = type(item)
            if kind is dict:
                inside += item.values()
            elif kind is list:
                inside += item
            elif isinstance(item, msgspec.Struct):
                inside += [one for one in msgspec.structs.astuple(item) if one is not None and type(one) is not str]
        if not inside:
            return False
        level = inside
    return True


def _not_of_type(message: str) -> BadRequest:
    at = _AT.search(message)
    missing = _MISSING.search(message)
    where = at.group(1) if at else ""
    if missing:
        return BadRequest(f"{where or 'the body'} has no {missing.group(1)}", where or missing.group(1))
    what = message[: at.start()] if at else message
    return BadRequest(f"{where or 'the body'}: {what[0].lower()}{what[1:]}", where or None)


def event(data: bytes) -> bytes:
    """A server-sent event of JSON ``data`` without a name.

    Some clients take U+0085, U+2028 and U+2029 for line ends: there they are escaped.
    """
    if not data.isascii():
        data = data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
        data = data.replace(b"\xc2\x85", rb"\u0085")
    return b"data: " + data + b"\n\n"


def overflow(message: str) -> tuple[int, int] | None:
    """The tokens of the prompt and of the engine's context, from the message of a context overflow."""
    found = _OVERFLOW.search(message)
    return (int(found.group(1)), int(found.group(2))) if found else None
