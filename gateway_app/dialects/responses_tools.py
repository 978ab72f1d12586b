"""The tools of the Responses API as functions, and the names by which a model's calls go back.

- ``function``: as it is.
- ``namespace``: each of its functions, named ``namespace__function`` (with a number behind it where that is taken). A
  call carries both names again, and a call in the history is named in the same way.
- ``custom``: a function with one string, ``input``. A call carries that string; arguments of another form, as text.
- All others (web_search, file_search, code_interpreter, image_generation, mcp, computer, local_shell, tool_search …)
  are run by the provider or need a model that was trained for them: they are left out, and a choice of one is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway_app.dialects.chat_messages import checked_tools
from gateway_app.dialects.dialect import BadRequest
from gateway_app.dialects.wire import encode

Object = dict[str, Any]

OURS = ("function", "custom")
INPUT: Object = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
NOTHING: Object = {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True):
    """Of any type; each type has its own of these fields."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None
    format: Object | None = None
    tools: list[Tool] | None = None


class Named(msgspec.Struct, frozen=True):
    """A tool as the program knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Toolbox:
    """The functions of one request. ``named`` is by the function's name."""

    def __init__(self, tools: list[Object]) -> None:
        self.functions: list[Object] = []
        self.named: dict[str, Named] = {}
        self._flat: dict[tuple[str, str], str] = {}
        read = [_read(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
        self._taken = {tool.name for tool in read if tool.type in OURS}
        for place, tool in enumerate(read):
            if tool.type in OURS:
                self._add(tool, None, f"tools[{place}]")
            elif tool.type == "namespace":
                self._add_namespace(tool, f"tools[{place}]")

    def flat(self, name: str, namespace: str | None) -> str:
        """The function's name of a tool, which may be one that this request does not have."""
        return self._flat.get((namespace, name), joined(namespace, name)) if namespace else name

    def chosen(self, choice: str | Object | None) -> tuple[list[Object], str | Object | None]:
        """The tools that may be called, and the engine's ``tool_choice``. Raises BadRequest."""
        if isinstance(choice, dict):
            choice = self._choice(choice)
        return checked_tools(self.functions, choice)

    def _choice(self, choice: Object) -> Object:
        kind = choice.get("type")
        if kind == "allowed_tools":
            entries = choice.get("tools")
            shown = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
            allowed = [self._function(entry) for entry in shown if entry.get("type") in OURS]
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
        if kind not in OURS:
            raise BadRequest(
                "tool_choice.type must be function, custom or allowed_tools: no others run here", "tool_choice"
            )
        return self._function(choice)

    def _function(self, entry: Object) -> Object:
        name, namespace = entry.get("name"), entry.get("namespace")
        if not isinstance(name, str) or not isinstance(namespace, str | None):
            raise BadRequest("tool_choice: name and namespace must be strings", "tool_choice")
        return {"type": "function", "function": {"name": self.flat(name, namespace)}}

    def _add_namespace(self, tool: Tool, where: str) -> None:
        if not tool.name:
            raise BadRequest(f"{where}.name must be a string", f"{where}.name")
        for place, inner in enumerate(tool.tools or []):
            if inner.type in OURS:
                self._add(inner, tool, f"{where}.tools[{place}]")

    def _add(self, tool: Tool, inside: Tool | None, where: str) -> None:
        if not tool.name:
            raise BadRequest(f"{where}.name must be a string", f"{where}.name")
        namespace = inside.name if inside else None
        flat = tool.name
        if namespace:
            flat = self._free(joined(namespace, tool.name))
            self._flat[namespace, tool.name] = flat
        self.named[flat] = Named(name=tool.name, namespace=namespace, custom=tool.type == "custom")
        function: Object = {"name": flat}
        if description := _description(tool, inside):
            function["description"] = description
        function["parameters"] = INPUT if tool.type == "custom" else tool.parameters or NOTHING
        if tool.strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})

    def _free(self, name: str) -> str:
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}_{number}", number + 1
        self._taken.add(free)
        return free


def joined(namespace: str, name: str) -> str:
    return f"{namespace.removesuffix('__')}__{name}"


def custom_input(arguments: str) -> str:
    """The string of a custom call, whose arguments were sampled as those of a function."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except (msgspec.DecodeError, RecursionError):
        return arguments


def custom_arguments(text: str) -> str:
    return encode({"input": text}).decode()


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    input: str


def _read(tool: Object, where: str) -> Tool:
    try:
        return msgspec.convert(tool, Tool)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}", where) from None


def _description(tool: Tool, inside: Tool | None) -> str:
    """With what the namespace says of all its functions, and with the grammar of a custom tool: nothing enforces it."""
    texts = [tool.description, inside.description if inside else None]
    grammar = (tool.format or {}).get("definition") if tool.type == "custom" else None
    if isinstance(grammar, str):
        texts.append(f"The input must match this grammar:\n{grammar}")
    return "\n\n".join(text for text in texts if text)
