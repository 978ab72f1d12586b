"""What a dialect is: it turns a provider's request into ours and our response into the provider's.

Ours is the request that vLLM's chat endpoints take (messages, tools and options in OpenAI's chat shape), and a response
that comes as a row of ``Delta``, then ``Ended``. A dialect is pure: bytes in, bytes out.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class BadRequest(ValueError):
    """A body that the dialect does not allow, or that we cannot serve. ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whatever its dialect.

    ``messages`` and ``tools`` are in chat shape, in the order in which the request has them. ``options`` are the other
    fields of the chat request (``tool_choice``, ``temperature``, ``max_tokens``, ``stop``, ``response_format`` …).
    ``shown`` is what only this dialect's writer needs.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    options: dict[str, Any] = {}
    streamed: bool = False
    shown: Any = None


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` and ``name`` come once, with call ``index``'s first delta; ``arguments`` is the next piece of its text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of a response. What it has stands in the order reasoning, content, tool calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: list[dict[str, Any]] | None = None
    """OpenAI's entries (token, logprob, bytes, top_logprobs) of this piece, where the request asked for them."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments`` is the text that was sampled: usually JSON, and whatever else a model may write."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    logprobs: list[dict[str, Any]] | None = None

    def message(self) -> dict[str, Any]:
        """As an assistant message of chat shape."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. ``cached`` of the prompt's came from the engine's prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """``stop_sequence`` is the stop string that ended the response, if one did."""

    finish_reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None


class Writer(Protocol):
    """Writes one response. Streamed: ``start`` once, ``delta`` any number of times, ``end`` once.

    ``keep_alive`` may come at any place, also before ``start``; ``failed`` in place of all that is still to come.
    """

    def start(self, prompt_tokens: int | None) -> bytes:
        """Events that open the response; ``prompt_tokens`` is None where the engine has not told them yet."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, ended: Ended) -> bytes:
        """Closes what is open, then the terminal events."""
        ...

    def keep_alive(self) -> bytes:
        """An event that resets every client's idle timer; never a comment."""
        ...

    def failed(self, status: int, message: str, code: str | None) -> bytes:
        """An error inside a stream whose headers are gone: the client must not take it for the end."""
        ...

    def whole(self, reply: Reply, ended: Ended) -> bytes:
        """The body of a response that is not streamed."""
        ...


class Dialect(Protocol):
    """One provider's API."""

    @property
    def name(self) -> str: ...

    def parse(self, content: bytes, model: str | None = None, streamed: bool = False) -> ModelRequest:
        """``model`` and ``streamed`` are what the URL says, for dialects that have them there. Raises BadRequest."""
        ...

    def writer(self, request: ModelRequest, call_id: str) -> Writer: ...

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        """``code`` is ours (``context_overflow``, ``engine_unavailable`` …); where the dialect has its own, that."""
        ...

    def count(self, tokens: int) -> bytes:
        """The answer to a request to count ``tokens``."""
        ...
