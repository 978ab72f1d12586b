"""Sampling by plain Chat Completions with token ids, for engines without token endpoints. History is the template's.

Such an engine tells the prompt's ids with its answer, and not which weights sampled: the label of the weights is asked
for before and after, and a call during which it changed is no exact sample.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from gateway_app.call import Call, Prompt
from gateway_app.dialects.dialect import Delta
from gateway_app.failures import OVERFLOW
from gateway_app.sampling.sample import InexactSample, asked_sampling, version_number
from gateway_app.sampling.sampling import close_on, delta, held, whole_delta
from gateway_app.stopping import unless_stopped
from polar.engine import chat_api
from polar.engine.chunks import Chunk
from polar.engine.client import (
    EngineClient,
    EngineError,
    EngineFault,
    EngineRefused,
    EngineUnavailable,
    EventStream,
    only_choice,
)
from schemas.sessions import VersionSpan

FRESH_S = 0.25
"""How long a label serves calls that begin, without being asked for again."""


class WeightLabel:
    """The engine's label, asked for as rarely as calls need: an answer serves all who waited before it began."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._next: asyncio.Task[str] | None = None
        self._asking: asyncio.Task[str] | None = None
        self._last: tuple[str, float] | None = None

    @property
    def last(self) -> str | None:
        """What it last was, unless that is too long ago: a call that begins with an old label would end in an error."""
        if self._last is None or time.monotonic() - self._last[1] > FRESH_S:
            return None
        return self._last[0]

    async def now(self) -> str:
        """As it is at a moment after this was called. Raises EngineError."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask(self._asking))
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait({before})
        self._asking, self._next = self._next, None
        label = await chat_api.weight_version(self._engine)
        self._last = (label, time.monotonic())
        return label

    def forget(self) -> None:
        self._last = None


class ChatSampling:
    def __init__(self, engine: EngineClient, label: WeightLabel, call: Call, hold_s: float) -> None:
        self._engine = engine
        self._label = label
        self._call = call
        self._hold_s = hold_s
        self._stream: EventStream | None = None
        self._logprobs = bool(call.chat_request.get("logprobs"))
        self._began_with: str | None = None
        self._closing: asyncio.Task[None] | None = None
        self.finish_reason: str | None = None
        self.last_news = time.monotonic()

    async def open(self) -> None:
        await held(self._begin, self._call, self._hold_s)

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        if self._stream is not None:
            self._stream.close()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        pieces = self._streamed() if self._stream is not None else self._whole()
        try:
            async for piece in pieces:
                yield piece
        except EngineUnavailable:
            if not self._call.stop.is_set:
                raise
        stop = self._call.stop
        if stop.is_set:
            self.finish_reason = self._call.sample.finish_reason = "abort"
        try:
            await self._name_version()
        except (EngineError, InexactSample):
            if stop.why is not None:
                raise stop.why from None
            raise

    async def _begin(self) -> None:
        """Asks the engine. Raises EngineError."""
        call = self._call
        self._began_with = self._label.last or await self._label.now()
        if not call.planned:
            call.plan(Prompt(ids=None, sampling=asked_sampling(call.chat_request)))
        if call.request.streamed:
            self._stream = await unless_stopped(self._opened(), call.stop)
            self._closing = asyncio.create_task(close_on(call.stop, self._stream.close))

    async def _opened(self) -> EventStream:
        stream = chat_api.stream(self._engine, self._call.chat_request)
        try:
            return await stream.__aenter__()
        except EngineRefused as refused:
            stream = chat_api.stream(self._engine, _without_limit(self._call, refused))
            return await stream.__aenter__()

    async def _streamed(self) -> AsyncGenerator[Delta, None]:
        assert self._stream is not None
        sample = self._call.sample
        async for chunks in self._stream:
            self.last_news = time.monotonic()
            content: list[str] = []
            for chunk in chunks:
                sample.take(chunk)
                for choice in chunk.choices:
                    piece = choice.delta
                    if piece is None:
                        continue
                    if piece.content and not (piece.reasoning or piece.tool_calls or self._logprobs):
                        content.append(piece.content)
                    elif (other := delta(piece, choice, self._logprobs)) is not None:
                        if content:
                            yield Delta(content="".join(content))
                            content = []
                        yield other
            if content:
                yield Delta(content="".join(content))

    async def _whole(self) -> AsyncGenerator[Delta, None]:
        chunk = await unless_stopped(self._answer(), self._call.stop)
        self._call.sample.take(chunk)
        choice = only_choice(chat_api.CHAT, chunk)
        if choice.message and (piece := whole_delta(choice.message, choice, self._logprobs)) is not None:
            yield piece

    async def _answer(self) -> Chunk:
        """An engine that went away before it answered is waited for, and asked once more."""
        try:
            return await self._asked()
        except EngineUnavailable:
            self._label.forget()
            await held(self._begin, self._call, self._hold_s)
            return await self._asked()

    async def _asked(self) -> Chunk:
        try:
            return await chat_api.whole(self._engine, self._call.chat_request)
        except EngineRefused as refused:
            return await chat_api.whole(self._engine, _without_limit(self._call, refused))

    async def _name_version(self) -> None:
        """Raises InexactSample where the weights changed, EngineError where the engine cannot say."""
        sample = self._call.sample
        label = await self._label.now()
        if label != self._began_with:
            raise InexactSample(f"the weights changed from {self._began_with} to {label} during the call")
        if sample.ids:
            sample.spans = [VersionSpan(version_number(label), 0, len(sample.ids))]
        if sample.finish_reason == "abort" and not self._call.stop.is_set:
            raise EngineFault("the engine ended the call before its time")


def _without_limit(call: Call, refused: EngineRefused) -> dict[str, object]:
    """The request without ``max_tokens``, where that is more than the context has room for. Raises ``refused``."""
    if "max_tokens" not in call.chat_request or not (
        OVERFLOW.search(str(refused)) or refused.error.get("param") == "max_tokens"
    ):
        raise refused
    return {name: value for name, value in call.chat_request.items() if name != "max_tokens"}
