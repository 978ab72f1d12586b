"""What both ways to sample have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from gateway_app.call import Call
from gateway_app.dialects.dialect import Delta, Ended, FinishReason, ToolCallDelta, Usage
from gateway_app.failures import classify
from gateway_app.sampling.sample import Sample
from gateway_app.stopping import Stop
from polar.engine.chunks import Choice, MessagePiece
from polar.engine.client import EngineUnavailable

RETRY_S = 0.5
"""Between two tries at an engine that is away."""
REASONS: dict[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls", "content_filter": "content_filter"}

T = TypeVar("T")


class Sampling(Protocol):
    """One call's sampling. ``open`` returns once the engine is asked and call.started is planned."""

    finish_reason: str | None
    """Once the deltas have ended."""
    last_news: float
    """When the engine last sent anything, on the monotonic clock."""

    async def open(self) -> None:
        """Raises EngineError, StreamError, Failure."""
        ...

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is sampled, as it comes. Raises EngineError, InexactSample, Failure."""
        ...

    async def close(self) -> None:
        """Ends what still goes on."""
        ...


async def held(ask: Callable[[], Awaitable[T]], call: Call, hold_s: float) -> T:
    """``ask``, again each half second while the engine is away, for ``hold_s`` and while the call is not stopped.

    The log says at once that the engine is away. Raises EngineUnavailable.
    """
    try:
        return await ask()
    except EngineUnavailable as error:
        await call.away(classify(error))
    deadline = time.monotonic() + hold_s
    while True:
        try:
            return await ask()
        except EngineUnavailable:
            if time.monotonic() >= deadline or await call.stop.within(RETRY_S):
                raise


def ended(sample: Sample, prompt_tokens: int, finish_reason: str | None, has_tool_calls: bool) -> Ended:
    """As the client sees the end."""
    reason = finish_reason or sample.finish_reason or "stop"
    if has_tool_calls and reason == "stop":
        reason = "tool_calls"
    return Ended(
        finish_reason=REASONS.get(reason, "stop"),
        usage=Usage(prompt=prompt_tokens, completion=len(sample.ids), cached=sample.cached),
        stop_sequence=sample.stop_reason if isinstance(sample.stop_reason, str) else None,
    )


def delta(piece: MessagePiece, choice: Choice, logprobs: bool) -> Delta | None:
    """The engine's piece in our shape; None where it has nothing for the client."""
    calls = tuple(
        ToolCallDelta(index=call.index, id=call.id, name=call.function.name, arguments=call.function.arguments or "")
        for call in piece.tool_calls or ()
    )
    shown = shown_logprobs(choice) if logprobs else None
    if not (piece.content or piece.reasoning or calls or shown):
        return None
    return Delta(reasoning=piece.reasoning or "", content=piece.content or "", tool_calls=calls, logprobs=shown)


def whole_delta(message: MessagePiece, choice: Choice, logprobs: bool) -> Delta | None:
    """A whole message as one delta: its tool calls are counted here, since the engine does not number them."""
    found = delta(message, choice, logprobs)
    if found is None or not found.tool_calls:
        return found
    numbered = tuple(msgspec.structs.replace(call, index=index) for index, call in enumerate(found.tool_calls))
    return msgspec.structs.replace(found, tool_calls=numbered)


def shown_logprobs(choice: Choice) -> list[dict[str, Any]] | None:
    """In OpenAI's shape."""
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    return [
        {
            "token": entry.token or "",
            "logprob": entry.logprob,
            "bytes": list((entry.token or "").encode()),
            "top_logprobs": [],
        }
        for entry in entries
    ] or None


async def close_on(stop: Stop, close: Callable[[], None]) -> None:
    await stop.wait()
    close()
