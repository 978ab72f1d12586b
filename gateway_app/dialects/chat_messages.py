"""The checks of messages and tools in chat shape: what passes, the engine can render or refuse, and never fails on."""

from __future__ import annotations

from typing import Any

from gateway_app.dialects.dialect import BadRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages in the same order; an assistant's are cleaned of nulls. Raises BadRequest.

    A developer message is a system message where it stands: most chat templates drop a role that they do not know.
    """
    if not messages:
        raise BadRequest("messages must not be empty", "messages")
    return [_checked(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = ": it is deprecated; use tool_calls and the role tool" if role == "function" else ""
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}{hint}", f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            _check_part(part, f"{where}.content[{place}]")
    elif not isinstance(content, str) and (content is not None or role not in ("assistant", "tool")):
        raise BadRequest(f"{where}.content must be a string or a list of parts", f"{where}.content")
    if role == "assistant":
        return _assistant(message, where)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise BadRequest(f"{where}.tool_call_id must be a string", f"{where}.tool_call_id")
    return message | {"role": "system"} if role == "developer" else message


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal"):
        if not isinstance(part.get(kind), str):
            raise BadRequest(f"{where}.{kind} must be a string", where)
    elif kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        if not isinstance(url, str) or not url.startswith("data:image/"):
            raise BadRequest(f"{where}.image_url.url must be a data:image/… URL: nothing is fetched", where)
    else:
        raise BadRequest(f"{where}.type must be text, refusal or image_url", where)
    if "uuid" in part:
        raise BadRequest(f"{where}.uuid must be left out: the part has its content", where)


def _assistant(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Without nulls, and with the reasoning under one name."""
    clean = {name: value for name, value in message.items() if value is not None and name != "reasoning"}
    clean["content"] = message.get("content")
    if "reasoning_content" not in clean and message.get("reasoning") is not None:
        clean["reasoning_content"] = message["reasoning"]
    if not isinstance(clean.get("reasoning_content", ""), str):
        raise BadRequest(f"{where}.reasoning_content must be a string", f"{where}.reasoning_content")
    if "function_call" in clean:
        raise BadRequest(f"{where}.function_call is deprecated: use tool_calls", f"{where}.function_call")
    calls = clean.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    for place, call in enumerate(calls):
        if not _is_call(call):
            at = f"{where}.tool_calls[{place}]"
            raise BadRequest(f"{at} must be a function call with strings as id, name and arguments", at)
    if calls:
        clean["tool_calls"] = calls
    return clean


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        return False
    function = call.get("function")
    return (
        isinstance(function, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )


def checked_tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools that may be called, and the engine's ``tool_choice``: None where it is the default. Raises BadRequest.

    A choice of several allowed tools leaves the others out: the engine knows no other way to keep to them.
    """
    names = [_tool_name(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, names, choice.get("allowed_tools"))
    if isinstance(choice, dict):
        name = _function_name(choice)
        if name not in names:
            raise BadRequest("tool_choice must name one of the tools", "tool_choice")
        return tools, {"type": "function", "function": {"name": name}}
    if choice not in (None, "none", "auto", "required"):
        raise BadRequest("tool_choice must be none, auto, required or a function's name as an object", "tool_choice")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice is required, but there are no tools", "tool_choice")
    return tools, choice if tools else None


def _tool_name(tool: dict[str, Any], where: str) -> str:
    name = _function_name(tool)
    if name is None:
        raise BadRequest(f"{where} must be a function with a name: no other tools are served", where)
    function = tool["function"]
    if not isinstance(function.get("parameters"), dict | None) or not isinstance(
        function.get("description"), str | None
    ):
        raise BadRequest(f"{where}.function: parameters must be an object, and description a string", where)
    return name


def _function_name(tool: Any) -> str | None:
    """Of a tool, or of a choice of one."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _allowed(tools: list[dict[str, Any]], names: list[str], allowed: Any) -> tuple[list[dict[str, Any]], str]:
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    wanted = [_function_name(entry) for entry in entries] if isinstance(entries, list) else []
    if not wanted or not set(wanted) <= set(names) or allowed.get("mode") not in ("auto", "required"):
        raise BadRequest("tool_choice.allowed_tools needs a mode (auto, required) and names of tools", "tool_choice")
    return [tool for tool, name in zip(tools, names, strict=True) if name in wanted], allowed["mode"]
