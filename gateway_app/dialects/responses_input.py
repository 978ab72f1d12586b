"""``input`` of the Responses API as messages of chat shape.

What one response made (reasoning, text, calls) is one assistant message again. Items belong to one response by their
ids where a program sends them back; without ids, calls belong to the assistant's text just before them, and reasoning
to what follows it. Reasoning that nothing of the assistant follows is dropped: its response was never finished.

A developer message is a system message where it stands: most chat templates drop a role that they do not know.
Images in a tool's output follow in a user message: no chat template is sure to take images in a tool message.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import msgspec

from gateway_app.dialects.dialect import BadRequest
from gateway_app.dialects.responses_tools import Toolbox, custom_arguments

Object = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant"})
TEXTS = frozenset({"input_text", "output_text", "text"})
_MARK = b"reasoning\n"
_ID = re.compile(r"(?:msg|rs|fc|ctc)_(.+)_\d+")


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class Item(msgspec.Struct, frozen=True):
    """Of any type; each type has its own of these fields."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


def item_id(kind: str, call_id: str, place: int) -> str:
    """Of an item of our response ``call_id``."""
    return f"{kind}_{call_id}_{place}"


def sealed(call_id: str, reasoning: str) -> str:
    """``encrypted_content``: opaque to programs, which send it back also where they drop the reasoning itself."""
    return base64.b64encode(_MARK + f"{call_id}\n{reasoning}".encode()).decode()


def unsealed(content: str | None) -> tuple[str, str] | None:
    """The response's ``call_id`` and its reasoning; None where the content is another's."""
    try:
        found = base64.b64decode(content or "", validate=True)
        call_id, end, reasoning = found.removeprefix(_MARK).decode().partition("\n")
    except (binascii.Error, ValueError):
        return None
    return (call_id, reasoning) if found.startswith(_MARK) and end else None


def messages(items: str | list[Item], tools: Toolbox) -> list[Object]:
    """Raises BadRequest."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    history = _History(tools)
    for place, item in enumerate(items):
        history.add(item, f"input[{place}]")
    return history.whole()


class _History:
    """Grows with each item."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._messages: list[Object] = []
        self._reply: Object | None = None
        """The assistant message that items may still join."""
        self._response: str | None = None
        """The call that sampled it, as far as its items have told."""
        self._thought: tuple[str | None, str] = (None, "")
        """Reasoning that waits for its message, and the call that sampled it."""
        self._images: list[Object] = []

    def whole(self) -> list[Object]:
        self._show_images()
        return self._messages

    def add(self, item: Item, where: str) -> None:
        if item.type in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
            return
        self._show_images()
        if item.type == "reasoning":
            self._think(item, where)
        elif item.type in ("function_call", "custom_tool_call"):
            self._call(item, where)
        elif item.type == "message" and item.role == "assistant":
            self._say(item, where)
        elif item.type == "message":
            self._message(item, where)
        else:
            hint = (
                ": nothing is kept here, send the item itself (store: false)" if item.type == "item_reference" else ""
            )
            raise BadRequest(f"{where}: an item of type {item.type!r} cannot be served here{hint}", where)

    def _message(self, item: Item, where: str) -> None:
        if item.role not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
        self._close()
        role = "system" if item.role == "developer" else item.role
        self._messages.append({"role": role, "content": _content(item.content, f"{where}.content")})

    def _output(self, item: Item, where: str) -> None:
        if item.output is None:
            raise BadRequest(f"{where}.output must be a string or a list of parts", f"{where}.output")
        self._close()
        content = _content(item.output, f"{where}.output")
        if isinstance(content, list):
            self._images += [part for part in content if part["type"] == "image_url"]
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        call_id = _needed(item.call_id, f"{where}.call_id")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _think(self, item: Item, where: str) -> None:
        ours = unsealed(item.encrypted_content)
        response = _response(item)
        if ours:
            response, text = ours
        else:
            shown = item.content if isinstance(item.content, list) else []
            text = "".join(part.text or "" for part in shown or item.summary or [])
        if self._reply is not None and response is not None and response == self._response:
            self._reply["reasoning_content"] = self._reply.get("reasoning_content", "") + text
            return
        self._reply = self._response = None
        known, before = self._thought
        other = known is not None and response is not None and known != response
        self._thought = (response or known, text if other else before + text)

    def _say(self, item: Item, where: str) -> None:
        content = _content(item.content, f"{where}.content", joined=True)
        response = _response(item)
        if self._reply is None or response is None or response != self._response:
            self._open(response)
        reply = self._reply_of(response)
        reply["content"] = (reply["content"] or "") + content

    def _call(self, item: Item, where: str) -> None:
        name = self._tools.flat(_needed(item.name, f"{where}.name"), item.namespace)
        if item.type == "custom_tool_call":
            arguments = custom_arguments(_needed(item.input, f"{where}.input", empty=True))
        else:
            arguments = _needed(item.arguments, f"{where}.arguments", empty=True)
        function = {"name": name, "arguments": arguments}
        call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function", "function": function}
        response = _response(item)
        if self._reply is None or (response and self._response and response != self._response):
            self._open(response)
        self._reply_of(response).setdefault("tool_calls", []).append(call)

    def _open(self, response: str | None) -> None:
        """The assistant's next message, with the reasoning before it unless that was another response's."""
        thought_of, thought = self._thought
        self._reply = {"role": "assistant", "content": None}
        self._response = None
        if thought and not (response and thought_of and response != thought_of):
            self._reply["reasoning_content"] = thought
            self._response = thought_of
        self._thought = (None, "")
        self._messages.append(self._reply)

    def _reply_of(self, response: str | None) -> Object:
        assert self._reply is not None
        self._response = self._response or response
        return self._reply

    def _close(self) -> None:
        """Nothing joins what came before."""
        self._reply = self._response = None
        self._thought = (None, "")

    def _show_images(self) -> None:
        if self._images:
            self._messages.append({"role": "user", "content": self._images})
            self._images = []


def _response(item: Item) -> str | None:
    """The call that sampled the item, where it has an id of ours."""
    found = _ID.fullmatch(item.id or "")
    return found.group(1) if found else None


def _content(content: str | list[Part] | None, where: str, joined: bool = False) -> Any:
    """One text is a string, so that a program may write it either way. ``joined``: texts only, as one string."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{place}]") for place, part in enumerate(content or [])]
    if joined:
        if any(part["type"] != "text" for part in parts):
            raise BadRequest(f"{where}: the assistant's content must be text", where)
        return "".join(part["text"] for part in parts)
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Part, where: str) -> Object:
    if part.type in TEXTS or part.type == "refusal":
        text = part.refusal if part.type == "refusal" else part.text
        return {"type": "text", "text": _needed(text, where, empty=True)}
    if part.type == "input_image":
        if part.image_url is None or not part.image_url.startswith("data:image/"):
            raise BadRequest(f"{where}.image_url must be a data:image/… URL: nothing is fetched", f"{where}.image_url")
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    raise BadRequest(f"{where}: a part of type {part.type!r} cannot be served here", where)


def _needed(value: str | None, where: str, empty: bool = False) -> str:
    if value is None or not (value or empty):
        raise BadRequest(f"{where} must be a string", where)
    return value
