"""What ``/inference/v1/generate`` streams: server-sent events, each with the ids and log-probs of some tokens."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True):
    """``logprob`` in nats, of the distribution that was sampled."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob] | None = None


class EngineVersionSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` (included) to ``end`` (excluded) of the response; ``version`` is the engine's label."""

    version: str
    start: int
    end: int


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[EngineVersionSpan] | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[GenerateChoice] = []
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


decode_chunk = msgspec.json.Decoder(GenerateChunk).decode


async def server_sent_events(blocks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, up to ``[DONE]``. An event may be of any length and be cut anywhere."""
    buffer = b""
    async for block in blocks:
        buffer += block
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                yield data
