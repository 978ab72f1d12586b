"""What the engine answers, decoded to what is needed of it: streams of sampled tokens, prompts, parsed text."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import msgspec

MISSING_LOGPROB = -9999.0
"""vLLM writes this where it has no log-prob for the sampled token."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """``logprob`` in nats, of the distribution that was sampled. Token streams name the id, chat answers the text."""

    logprob: float
    token_id: int | None = None
    token: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob] | None = None


class EngineVersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` (included) to ``end`` (excluded) of the response; ``version`` is the engine's label."""

    version: str
    start: int
    end: int


class FunctionPiece(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: FunctionPiece = FunctionPiece()


class MessagePiece(msgspec.Struct, frozen=True):
    """A delta of an assistant message, or a whole one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class EngineUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Of a token stream or of a chat stream; a whole chat answer has ``message`` in place of ``delta``."""

    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[EngineVersionSpan] | None = None
    delta: MessagePiece | None = None
    message: MessagePiece | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: EngineUsage | None = None
    error: dict[str, Any] | None = None


class Derendered(msgspec.Struct, frozen=True):
    """One chunk of text, and the state to send with the next."""

    chunk: Chunk
    stream_state: msgspec.Raw


decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_derendered = msgspec.json.Decoder(Derendered).decode


async def event_blocks(blocks: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """The data of the server-sent events that arrived together, up to ``[DONE]``.

    An event may be of any length and be cut anywhere.
    """
    buffer = b""
    async for block in blocks:
        *events, buffer = (buffer + block if buffer else block).split(b"\n\n")
        found = [data for event in events if (data := event.strip().removeprefix(b"data:").strip())]
        if b"[DONE]" in found:
            if last := found[: found.index(b"[DONE]")]:
                yield last
            return
        if found:
            yield found
