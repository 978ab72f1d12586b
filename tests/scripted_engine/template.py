"""The chat template: ChatML with Hermes tool calls, and the habits by which real templates rewrite history.

Without any habit, the rendered history of a reply is the very text that was sampled.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """``strip_reasoning``: thoughts before the last user message are left out. ``reserialise``: the arguments of calls
    are written anew, with sorted keys. ``no_think``: the generation prompt has an empty thought that history lacks.
    """

    strip_reasoning: bool = False
    reserialise: bool = False
    no_think: bool = False

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generation: bool) -> str:
        parts, last = [], len(messages)
        if tools:
            first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
            parts.append(_system(text_of(first["content"]) if first else "", tools))
            messages = messages[1:] if first else messages
        last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for at, message in enumerate(messages):
            parts.append(self._message(message, messages, at, last))
        if generation:
            parts.append("<|im_start|>assistant\n" + ("<think>\n\n</think>\n\n" if self.no_think else ""))
        return "".join(parts)

    def _message(self, message: dict[str, Any], messages: list[dict[str, Any]], at: int, last_user: int) -> str:
        role, content = message["role"], text_of(message.get("content"))
        if role == "tool":
            opens = at == 0 or messages[at - 1]["role"] != "tool"
            closes = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
            head, tail = "<|im_start|>user" if opens else "", "<|im_end|>\n" if closes else ""
            return f"{head}\n<tool_response>\n{content}\n</tool_response>{tail}"
        if role != "assistant":
            return f"<|im_start|>{role}\n{content}<|im_end|>\n"
        thought = message.get("reasoning") or message.get("reasoning_content")
        if self.strip_reasoning and at < last_user:
            thought = None
        return f"<|im_start|>assistant\n{self.reply(content, thought, calls_of(message))}<|im_end|>\n"

    def reply(self, content: str, thought: str | None, calls: list[tuple[str, str]]) -> str:
        """The text of one reply, as it is rendered and, without ``reserialise``, as it is sampled."""
        head = f"<think>{thought}</think>" if thought else ""
        if not calls:
            return head + content
        content = content.rstrip("\n")
        return head + "\n".join([*([content] if content else []), *(self._call(*call) for call in calls)])

    def _call(self, name: str, arguments: str) -> str:
        if self.reserialise:
            arguments = _again(arguments)
        return CALL.format(name=json.dumps(name), arguments=arguments)


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments as text) of each tool call of a message."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], one.get("arguments") or "{}") for one in functions]


def text_of(content: Any) -> str:
    """Text parts are joined by a newline, as vLLM does for a template that takes strings."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else part.get("text") or f"[{part['type']}]" for part in content)


def _again(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        value = {}
    return json.dumps(value if isinstance(value, dict) else {}, sort_keys=True, separators=(",", ":"))


def _system(content: str, tools: list[dict[str, Any]]) -> str:
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    head = f"{content}\n\n" if content else ""
    return (
        f"<|im_start|>system\n{head}# Tools\n\nYou may call functions. Their signatures are within <tools>:\n"
        f"<tools>\n{listed}\n</tools><|im_end|>\n"
    )
