"""Reads the fields of Google's JSON: in camelCase or, as its API takes them too, in snake_case."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from gateway_app.dialects.dialect import BadRequest

Object = dict[str, Any]
_HUMP = re.compile(r"[A-Z]")


@lru_cache(maxsize=256)
def _snake(name: str) -> str:
    return _HUMP.sub(lambda found: "_" + found.group().lower(), name)


def field(owner: Object, name: str, kind: Any, where: str = "") -> Any:
    """``owner``'s field, or None. Raises BadRequest where it is not of ``kind`` (a type, or a tuple of types)."""
    value = owner.get(name)
    if value is None:
        value = owner.get(_snake(name))
        if value is None:
            return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        path = f"{where}.{name}" if where else name
        raise BadRequest(f"{path} must be {_described(kind)}", path)
    return value


def objects(owner: Object, name: str, where: str = "") -> list[Object]:
    """A list of objects; an empty one where the field is missing."""
    found = field(owner, name, list, where) or []
    for place, item in enumerate(found):
        if not isinstance(item, dict):
            path = f"{where}.{name}[{place}]" if where else f"{name}[{place}]"
            raise BadRequest(f"{path} must be an object", path)
    return found


def strings(owner: Object, name: str, where: str = "") -> list[str]:
    found = field(owner, name, list, where) or []
    if not all(isinstance(item, str) for item in found):
        path = f"{where}.{name}" if where else name
        raise BadRequest(f"{path} must be a list of strings", path)
    return found


_NAMES = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}


def _described(kind: Any) -> str:
    if isinstance(kind, tuple):
        return " or ".join(_NAMES.get(one, "a number") for one in kind if one is not int or float not in kind)
    return _NAMES[kind]
