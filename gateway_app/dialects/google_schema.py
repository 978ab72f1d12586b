"""Google's schemas (a part of OpenAPI 3.0, types in upper case) as JSON Schema."""

from __future__ import annotations

from typing import Any

from gateway_app.dialects.dialect import BadRequest

DEEPEST = 64
_RENAMED = {
    "any_of": "anyOf",
    "one_of": "oneOf",
    "all_of": "allOf",
    "prefix_items": "prefixItems",
    "additional_properties": "additionalProperties",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "unique_items": "uniqueItems",
    "defs": "$defs",
    "ref": "$ref",
}
_DROPPED = frozenset({"nullable", "propertyOrdering", "property_ordering", "example"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "$defs"})


def json_schema(schema: Any, where: str, depth: int = 0) -> Any:
    """Raises BadRequest for a schema that is nested deeper than ``DEEPEST``.

    >>> json_schema({"type": "ARRAY", "items": {"type": "STRING", "nullable": True}, "minItems": "1"}, "x")
    {'type': 'array', 'items': {'type': ['string', 'null']}, 'minItems': 1}
    """
    if not isinstance(schema, dict):
        return schema
    if depth > DEEPEST:
        raise BadRequest(f"{where} is nested too deeply", where)
    converted: dict[str, Any] = {}
    for given, value in schema.items():
        name: str = _RENAMED.get(given) or given
        if name not in _DROPPED and value != "TYPE_UNSPECIFIED":
            converted[name] = _value(name, value, where, depth + 1)
    if schema.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


def _value(name: str, value: Any, where: str, depth: int) -> Any:
    if name == "type":
        return _type(value)
    if name in _SCHEMAS:
        return json_schema(value, where, depth)
    if name in _LISTS and isinstance(value, list):
        return [json_schema(item, where, depth) for item in value]
    if name in _MAPS and isinstance(value, dict):
        return {key: json_schema(item, where, depth) for key, item in value.items()}
    if name in _COUNTS and isinstance(value, str) and value.isdecimal():
        return int(value)
    return value


def _type(value: Any) -> Any:
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, list):
        return [item.lower() if isinstance(item, str) else item for item in value]
    return value
