"""A program's side of each dialect: a request, and the turn that it puts into its history for a response.

A turn is in the provider's own form. ``request(turns)`` is a body whose history is a question, then the turns.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import anthropic_client
import msgspec

from gateway_app.dialects.anthropic_messages import AnthropicMessages
from gateway_app.dialects.chat_completions import OpenAIChat
from gateway_app.dialects.dialect import Dialect, ModelRequest
from gateway_app.dialects.google_generate import GoogleGenerate
from gateway_app.dialects.openai_responses import OpenAIResponses

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
NAMES = ("read", "write")


class Client(Protocol):
    dialect: Dialect

    def request(self, turns: list[Any]) -> dict[str, Any]: ...

    def of_whole(self, body: dict[str, Any]) -> Any:
        """The turn of a response that was not streamed."""
        ...

    def of_stream(self, stream: bytes) -> Any:
        """The turn that the events add up to; None where they did not come to their end."""
        ...

    def parse(self, body: bytes) -> ModelRequest: ...


class Chat:
    dialect: Dialect = OpenAIChat()

    def parse(self, body: bytes) -> ModelRequest:
        return self.dialect.parse(body)

    def request(self, turns: list[Any]) -> dict[str, Any]:
        function = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
        system = {"role": "system", "content": "be brief"}
        question = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
        sampling = {"temperature": 0.5, "stop": ["x"], "tool_choice": "auto", "stream_options": {"include_usage": True}}
        return {"model": "m", "messages": [system, question, *turns], "tools": function, "stream": True} | sampling

    def of_whole(self, body: dict[str, Any]) -> Any:
        return body["choices"][0]["message"]

    def of_stream(self, stream: bytes) -> Any:
        *events, done = _events(stream)
        if done != "[DONE]":
            return None
        turn: dict[str, Any] = {"role": "assistant", "content": None}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            for choice in json.loads(event)["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name) is not None:
                        turn[name] = (turn.get(name) or "") + delta[name]
                for piece in delta.get("tool_calls", []):
                    call = calls.setdefault(piece["index"], {"function": {"arguments": ""}})
                    call |= {name: piece[name] for name in ("id", "type") if name in piece}
                    call["function"]["arguments"] += piece["function"].pop("arguments", "")
                    call["function"] |= piece["function"]
        return turn | ({"tool_calls": list(calls.values())} if calls else {})


class Anthropic:
    dialect: Dialect = AnthropicMessages()

    def parse(self, body: bytes) -> ModelRequest:
        return self.dialect.parse(body)

    def request(self, turns: list[Any]) -> dict[str, Any]:
        tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
        question = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        sampling = {"temperature": 0.5, "stop_sequences": ["x"], "tool_choice": {"type": "auto"}, "max_tokens": 10}
        system = [{"type": "text", "text": "be brief"}]
        messages: list[Any] = [question]
        for turn in turns:
            calls = [block["id"] for block in turn if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": "done"} for call in calls]
            messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": results or "and?"}]
        return {"model": "m", "system": system, "messages": messages, "tools": tools, "stream": True} | sampling

    def of_whole(self, body: dict[str, Any]) -> Any:
        return body["content"]

    def of_stream(self, stream: bytes) -> Any:
        ended = anthropic_client.events(stream)[-1]["type"] == "message_stop"
        return anthropic_client.assembled(stream)["content"] if ended else None


class Responses:
    dialect: Dialect = OpenAIResponses()

    def parse(self, body: bytes) -> ModelRequest:
        return self.dialect.parse(body)

    def request(self, turns: list[Any]) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
        question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        items = [question, *(item for turn in turns for item in turn)]
        sampling = {"temperature": 0.5, "max_output_tokens": 10, "tool_choice": "auto", "parallel_tool_calls": True}
        return {"model": "m", "instructions": "be brief", "input": items, "tools": tools, "stream": True} | sampling

    def of_whole(self, body: dict[str, Any]) -> Any:
        return body["output"]

    def of_stream(self, stream: bytes) -> Any:
        events = [json.loads(event) for event in _events(stream)]
        if events[-1]["type"] not in ("response.completed", "response.incomplete"):
            return None
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done
        return done


class Google:
    dialect: Dialect = GoogleGenerate()

    def parse(self, body: bytes) -> ModelRequest:
        return self.dialect.parse(body, "m", True)

    def request(self, turns: list[Any]) -> dict[str, Any]:
        declared = [{"name": name, "parametersJsonSchema": SCHEMA} for name in NAMES]
        config = {"temperature": 0.5, "stopSequences": ["x"], "thinkingConfig": {"includeThoughts": True}}
        return {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}, *turns],
            "systemInstruction": {"parts": [{"text": "be brief"}]},
            "tools": [{"functionDeclarations": declared}],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": config,
        }

    def of_whole(self, body: dict[str, Any]) -> Any:
        return body["candidates"][0]["content"]

    def of_stream(self, stream: bytes) -> Any:
        if not stream.endswith(b"\n\n"):
            return None
        candidates = [json.loads(event)["candidates"][0] for event in _events(stream)]
        assert [i for i, found in enumerate(candidates) if "finishReason" in found] == [len(candidates) - 1]
        return {"role": "model", "parts": [part for found in candidates for part in found["content"]["parts"]]}


CLIENTS: dict[str, Client] = {client.dialect.name: client for client in (Chat(), Anthropic(), Responses(), Google())}


def _events(stream: bytes) -> list[str]:
    """The data of each event."""
    lines = stream.decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def meaning(message: dict[str, Any]) -> Any:
    """Of an assistant message: texts, and calls with parsed arguments, or their text where they are no object."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [
        (call["id"], call["function"]["name"], parsed(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    return content, message.get("reasoning_content") or "", calls


def parsed(arguments: str) -> Any:
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    return found if isinstance(found, dict) else arguments
