"""Sampling by token ids: the prompt is rendered, or goes on from ids that were sampled; text comes from the ids.

A stream costs the engine a few calls a second, not one a token: what arrived while the last piece was turned into text
is turned into text together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from gateway_app.call import Call, Prompt
from gateway_app.dialects.dialect import Delta
from gateway_app.failures import Failure, classify
from gateway_app.sampling.prompts import Prompts
from gateway_app.sampling.sample import Sample
from gateway_app.sampling.sampling import RETRY_S, delta, held, whole_delta
from gateway_app.sampling.stop_cut import StopCut
from gateway_app.stopping import unless_stopped
from polar.engine import token_api
from polar.engine.client import EngineClient, EngineError, EngineFault, EngineUnavailable

PACE_S = 0.1
"""At least between two pieces of one stream after the first: the engine parses a response from its start for each."""
SHARE = 4
"""A piece that took the engine t seconds is followed by SHARE · t without one."""
SENDING = 3
"""Turns of the loop in which a request gets on its way, before anything else is done for the call."""
ABORT_S = 5.0


class ExactSampling:
    """``hold_s``: how long it waits for an engine that is away."""

    def __init__(self, engine: EngineClient, prompts: Prompts, call: Call, hold_s: float) -> None:
        self._engine = engine
        self._prompts = prompts
        self._call = call
        self._hold_s = hold_s
        self._news = asyncio.Event()
        self._away: EngineError | None = None
        self._logprobs = bool(call.chat_request.get("logprobs"))
        self._untold = False
        """Whether it was stopped before all that was sampled had become text."""
        self.finish_reason: str | None = None
        self.last_news = time.monotonic()

    async def open(self) -> None:
        call = self._call
        spliced = await held(lambda: unless_stopped(self._prompts.prompt(call), call.stop), call, self._hold_s)
        self._rendered, ids = spliced.rendered, spliced.rendered.token_ids
        self._ids = self._rendered.token_json
        call.sample = Sample(ids)
        self._derenderer = token_api.Derenderer(self._engine, call.chat_request, self._ids)
        self._reading = asyncio.create_task(self._read())
        self._stopping = asyncio.create_task(self._abort_on_stop())
        for _ in range(SENDING):
            await asyncio.sleep(0)
        call.plan(Prompt(ids=ids, sampling=spliced.sampling, exact=spliced.exact, note=spliced.note, base=spliced.base))

    async def close(self) -> None:
        """Ends what is still going on."""
        if hasattr(self, "_reading"):
            self._stopping.cancel()
            self._reading.cancel()
            await asyncio.gather(self._stopping, self._reading, return_exceptions=True)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        call, cut = self._call, StopCut(self._rendered.sampling_params.get("stop") or [])
        pieces = self._streamed() if call.request.streamed else self._whole()
        async for piece in pieces:
            if (shown := cut.take(piece)) is not None:
                yield shown
        if self._reading.cancelled():
            raise self._cut_off()
        await self._reading
        stop = call.sample.stop_reason
        if (rest := cut.rest(stop if isinstance(stop, str) else None)) is not None:
            yield rest
        if call.sample.finish_reason == "abort" and not call.stop.is_set:
            raise EngineFault("the engine ended the call before its time")
        if call.sample.finish_reason == "abort" or self._untold:
            self.finish_reason = "abort"

    async def _streamed(self) -> AsyncGenerator[Delta, None]:
        sample, taken, pause = self._call.sample, 0, 0.0
        while True:
            done = self._reading.done()
            fresh = sample.shown - taken
            if not done and fresh <= 0:
                self._news.clear()
                await self._news.wait()
                continue
            if self._call.stop.is_set:
                self._untold = True
                await asyncio.wait({self._reading})
                return
            finish = sample.finish_reason if done else None
            if fresh > 0 or finish:
                began = time.monotonic()
                choice = await self._derenderer.delta(self._choice(taken, sample.shown, finish))
                taken += max(fresh, 0)
                pause = max(PACE_S, SHARE * (time.monotonic() - began))
                self.finish_reason = choice.finish_reason or self.finish_reason
                if choice.delta and (piece := delta(choice.delta, choice, self._logprobs)) is not None:
                    yield piece
            if done:
                return
            await asyncio.wait({self._reading}, timeout=pause)

    async def _whole(self) -> AsyncGenerator[Delta, None]:
        await asyncio.wait({self._reading})
        sample = self._call.sample
        self._untold = self._call.stop.is_set
        if self._untold or not sample.shown:
            return
        choice = await self._derenderer.whole(self._choice(0, sample.shown, sample.finish_reason))
        self.finish_reason = choice.finish_reason
        if choice.message and (piece := whole_delta(choice.message, choice, self._logprobs)) is not None:
            yield piece

    def _choice(self, start: int, end: int, finish_reason: str | None) -> dict[str, Any]:
        sample = self._call.sample
        stop = sample.stop_reason if finish_reason else None
        choice: dict[str, Any] = {
            "token_ids": sample.ids[start:end], "finish_reason": finish_reason, "stop_reason": stop
        }  # fmt: skip
        if self._logprobs:
            pairs = zip(sample.ids[start:end], sample.logprobs[start:end], strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}
        return choice

    async def _read(self) -> None:
        """Takes what the engine samples. Asks again while the engine is away and nothing was sampled yet."""
        deadline = time.monotonic() + self._hold_s
        try:
            while True:
                try:
                    await self._sample()
                    return
                except EngineUnavailable as error:
                    self._away = error
                    late = time.monotonic() >= deadline or self._call.sample.ids
                    if late or await self._call.stop.within(RETRY_S):
                        raise
        finally:
            self._news.set()

    async def _sample(self) -> None:
        sample = self._call.sample
        async with token_api.generate(self._engine, self._rendered, self._ids, self._call.call_id) as stream:
            async for chunks in stream:
                self._away = None
                for chunk in chunks:
                    sample.take(chunk)
                self.last_news = time.monotonic()
                self._news.set()

    async def _abort_on_stop(self) -> None:
        """An aborted stream ends with its weight versions; a cut one would not."""
        await self._call.stop.wait()
        try:
            await token_api.abort(self._engine, self._call.call_id)
            await asyncio.wait({self._reading}, timeout=ABORT_S)
        except EngineError as error:
            self._away = error
        self._reading.cancel()

    def _cut_off(self) -> Failure:
        """Of a stopped call that the engine did not end: an engine that was away is at fault, not who stopped it."""
        if self._away is not None:
            return classify(self._away)
        if self._call.stop.why is not None and self._call.stop.why.infrastructure:
            return self._call.stop.why
        return Failure("stopped", "the call was stopped and the engine did not end it", 503)
