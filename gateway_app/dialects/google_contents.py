"""Google's ``contents`` as messages of chat shape.

- Text parts of a model are one text, however a client cut them, and its contents that follow each other one message.
- A call or response without an id gets one from its place: the same history always gives the same messages. A response
  without an id belongs to the first call of its name that has no response yet.
- Arguments that are no JSON object travel as ``{RAW: text}`` and come back as that text.
- Thinking comes back from parts marked ``thought`` or, where a program keeps only signatures, from ours.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from gateway_app.dialects.dialect import BadRequest
from gateway_app.dialects.google_fields import Object, field, objects
from gateway_app.dialects.wire import deeper, encode

RAW = "__raw_arguments__"
ARGUMENTS_DEEPEST = 64
"""Levels; deeper ones travel as text, so that a history with them can be taken back."""
_SIGNED = b"reasoning:"
_TOOL_ROLES = frozenset({"user", "function", "tool"})
_MARKS = frozenset({"thought", "thoughtSignature", "thought_signature", "partMetadata", "part_metadata"})
"""What a part may have besides its data; some programs send them alone."""
_KNOWN = _MARKS | {"text", "functionCall", "function_call", "functionResponse", "function_response"}
_KNOWN |= {"inlineData", "inline_data"}
_KEPT_OUT = {
    "fileData": "nothing is fetched: send the file as inlineData",
    "executableCode": "there is no code execution: give the model a function",
    "codeExecutionResult": "there is no code execution: give the model a function",
    "toolCall": "only functions are served",
    "toolResponse": "only functions are served",
}


def arguments_object(arguments: str) -> Object:
    """What stands in ``functionCall.args`` for the text that was sampled."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {RAW: arguments}
    if not isinstance(found, dict) or RAW in found or deeper(found, ARGUMENTS_DEEPEST):
        return {RAW: arguments}
    return found


def arguments_text(args: Object) -> str:
    raw = args.get(RAW)
    return raw if isinstance(raw, str) and len(args) == 1 else encode(args).decode()


def signature(reasoning: str) -> str:
    """``thoughtSignature``: opaque to programs, which send it back also where they drop the thought itself."""
    return base64.b64encode(_SIGNED + reasoning.encode()).decode()


def _signed(given: str) -> str:
    """The reasoning in a signature of ours; another's says nothing to us."""
    try:
        content = base64.b64decode(given, validate=True)
        return content.removeprefix(_SIGNED).decode() if content.startswith(_SIGNED) else ""
    except (binascii.Error, ValueError):
        return ""


def system_message(instruction: Any) -> list[Object]:
    """Of a string or a Content; no message where it is empty."""
    if instruction is None or isinstance(instruction, str):
        return [{"role": "system", "content": instruction}] if instruction else []
    if not isinstance(instruction, dict):
        raise BadRequest("systemInstruction must be a string or an object", "systemInstruction")
    texts = [field(part, "text", str, "systemInstruction.parts") for part in objects(instruction, "parts")]
    if None in texts:
        raise BadRequest("systemInstruction.parts must have text", "systemInstruction.parts")
    return [{"role": "system", "content": _content([_text_part(text) for text in texts])}] if texts else []


def messages(contents: list[Object]) -> list[Object]:
    """Raises BadRequest."""
    history = _History()
    for place, content in enumerate(contents):
        history.add(content, f"contents[{place}]")
    for message in history.messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return history.messages


class _History:
    """Grows with each content."""

    def __init__(self) -> None:
        self.messages: list[Object] = []
        self._calls = 0
        self._open: list[tuple[str, str]] = []
        """Calls without a response: (name, id)."""

    def add(self, content: Object, where: str) -> None:
        role = field(content, "role", str, where) or "user"
        parts = objects(content, "parts", where)
        for place, part in enumerate(parts):
            if not part.keys() <= _KNOWN:
                _refuse_foreign(part, f"{where}.parts[{place}]")
        if role in ("model", "assistant"):
            self._model(parts, where)
        elif role in _TOOL_ROLES or role == "system":
            self._asked(parts, "system" if role == "system" else "user", where)
        else:
            raise BadRequest(f"{where}.role must be user, model or function", f"{where}.role")

    def _model(self, parts: list[Object], where: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        message = self.messages[-1]
        thoughts, signed = "", ""
        for place, part in enumerate(parts):
            at = f"{where}.parts[{place}]"
            text = field(part, "text", str, at)
            if text is not None:
                if field(part, "thought", bool, at):
                    thoughts += text
                else:
                    message["content"] = (message["content"] or "") + text
            elif (call := field(part, "functionCall", dict, at)) is not None:
                message.setdefault("tool_calls", []).append(self._call(call, at))
            elif not part.keys() <= _MARKS:
                raise BadRequest(f"{at}: a model's part must be text or a functionCall", at)
            if not signed and (given := field(part, "thoughtSignature", str, at)):
                signed = _signed(given)
        _think(message, thoughts, signed)

    def _call(self, call: Object, where: str) -> Object:
        name = field(call, "name", str, f"{where}.functionCall")
        if not name:
            raise BadRequest(f"{where}.functionCall.name must be a string", f"{where}.functionCall.name")
        call_id = field(call, "id", str, f"{where}.functionCall") or f"call_{self._calls}"
        self._calls += 1
        self._open.append((name, call_id))
        arguments = arguments_text(field(call, "args", dict, f"{where}.functionCall") or {})
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _asked(self, parts: list[Object], role: str, where: str) -> None:
        """Responses are messages of their own; what stands between them is one message."""
        shown: list[Object] = []
        for place, part in enumerate(parts):
            at = f"{where}.parts[{place}]"
            response = field(part, "functionResponse", dict, at)
            if response is None:
                shown += _shown_part(part, at)
                continue
            if shown:
                self.messages.append({"role": role, "content": _content(shown)})
                shown = []
            self.messages.append(self._response(response, f"{at}.functionResponse"))
        if shown:
            self.messages.append({"role": role, "content": _content(shown)})

    def _response(self, response: Object, where: str) -> Object:
        name = field(response, "name", str, where) or ""
        call_id = field(response, "id", str, where)
        found = next((one for one in self._open if (one[1] == call_id if call_id else one[0] == name)), None)
        if found:
            self._open.remove(found)
        elif not call_id:
            raise BadRequest(f"{where}: there is no call of {name!r} without a response before it", where)
        shown = [_text_part(_response_text(field(response, "response", object, where)))]
        for place, part in enumerate(objects(response, "parts", where)):
            shown += _shown_part(part, f"{where}.parts[{place}]")
        return {"role": "tool", "tool_call_id": call_id or (found or ("", ""))[1], "content": _content(shown)}


def _refuse_foreign(part: Object, where: str) -> None:
    for name, reason in _KEPT_OUT.items():
        if field(part, name, object, where) is not None:
            raise BadRequest(f"{where}.{name}: {reason}", where)


def _think(message: Object, thoughts: str, signed: str) -> None:
    """The signature counts where there are no thoughts: it has them all."""
    if thoughts:
        message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
    elif signed:
        message.setdefault("reasoning_content", signed)


def _response_text(response: Any) -> str:
    """The text itself where there is nothing but text, as programs send the output of a tool."""
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return value
    if isinstance(response, str):
        return response
    return "" if response is None else encode(response).decode()


def _shown_part(part: Object, where: str) -> list[Object]:
    text = field(part, "text", str, where)
    if text is not None:
        return [_text_part(text)]
    data = field(part, "inlineData", dict, where)
    if data is not None:
        return [_inline(data, f"{where}.inlineData")]
    if not part.keys() <= _MARKS:
        raise BadRequest(f"{where}: a part must be text, inlineData or a functionResponse", where)
    return []


def _inline(data: Object, where: str) -> Object:
    kind = field(data, "mimeType", str, where) or ""
    content = field(data, "data", str, where) or ""
    content = content.replace("-", "+").replace("_", "/")
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}
    if not kind.startswith("text/"):
        raise BadRequest(f"{where}: the model takes text and images, not {kind or 'data without a mimeType'}", where)
    try:
        return _text_part(base64.b64decode(content, validate=True).decode())
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where}.data must be text in UTF-8, as base64", where) from None


def _text_part(text: str) -> Object:
    return {"type": "text", "text": text}


def _content(parts: list[Object]) -> str | list[Object]:
    """One text is a string."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
