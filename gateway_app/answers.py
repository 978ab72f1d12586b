"""Drives one call: from its sampling to its response, its end on the log and its delivery.

The order that all keep: call.started on its way → tokens to the client → call.started and call.completed acknowledged →
the end of the response → call.delivery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from gateway_app.budgets import Use
from gateway_app.call import Call
from gateway_app.dialects.dialect import Delta, Dialect, Ended, Writer
from gateway_app.dialects.reply import GrowingReply
from gateway_app.failures import Failure, classify, session_ended
from gateway_app.metrics import Metrics
from gateway_app.response import Response
from gateway_app.sampling.sample import InexactSample
from gateway_app.sampling.sampling import Sampling, ended
from gateway_app.stopping import stalled
from polar.engine.client import EngineError, EngineFault, EngineUnavailable
from streams.errors import StreamError

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
HEADERS_S = 5.0
"""A stream whose status is not known by then gets its headers: programs give up on a response without any."""
TICK_S = 1.0


class Exchange(msgspec.Struct, eq=False):
    """One call and all that answers it."""

    call: Call
    sampling: Sampling
    dialect: Dialect
    writer: Writer
    response: Response
    use: Use


class Answers:
    """``stall_s``: how long the engine may sample nothing."""

    def __init__(self, metrics: Metrics, stall_s: float) -> None:
        self._metrics = metrics
        self._stall_s = stall_s
        self._open: set[Exchange] = set()

    async def answer(self, exchange: Exchange) -> bool:
        """All of a call. Returns whether it may be asked for again: it was sampled, and nobody received it."""
        self._open.add(exchange)
        self._metrics.started()
        outcome = "cancelled"
        try:
            outcome = await self._sampled(exchange)
        except (EngineError, InexactSample, StreamError, Failure) as error:
            outcome = await self._failed(exchange, error)
        except Exception as error:
            log.exception("call %s", exchange.call.call_id)
            outcome = await self._failed(exchange, EngineFault(f"a fault of the gateway: {error!r}"))
        finally:
            self._open.discard(exchange)
            await exchange.sampling.close()
            self._metrics.ended(exchange.dialect.name, outcome)
        return outcome == "undelivered"

    async def keep_alive(self) -> None:
        """For ever: writes to those that wait, and stops those whose engine has stalled."""
        writing: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for exchange in self._open:
                if now - exchange.sampling.last_news > self._stall_s:
                    exchange.call.stop.set(stalled(self._stall_s))
                patience = KEEP_ALIVE_S if exchange.response.started else HEADERS_S
                if exchange.call.request.streamed and now - exchange.response.last_write >= patience:
                    task = asyncio.create_task(exchange.response.write(exchange.writer.keep_alive()))
                    writing.add(task)
                    task.add_done_callback(writing.discard)

    async def _sampled(self, exchange: Exchange) -> str:
        call = exchange.call
        await exchange.sampling.open()
        exchange.sampling.last_news = time.monotonic()
        exchange.use.started()
        if call.note:
            self._metrics.split(call.note)
        reply = GrowingReply()
        async with aclosing(exchange.sampling.deltas()) as deltas:
            if call.request.streamed:
                await self._streamed(exchange, deltas, reply)
            else:
                async for delta in deltas:
                    reply.add(delta)
        return await self._completed(exchange, reply)

    async def _streamed(self, exchange: Exchange, deltas: AsyncIterator[Delta], reply: GrowingReply) -> None:
        """Writes all but the end. The opening waits for the prompt's length, the headers do not."""
        call, response, writer = exchange.call, exchange.response, exchange.writer
        await call.may_show()
        opened = call.sample.prompt_ids is not None
        if opened:
            await response.write(writer.start(len(call.sample.prompt_ids or ())))
        else:
            await response.open()
        first = True
        async for delta in deltas:
            reply.add(delta)
            content = writer.delta(delta)
            if not opened:
                content, opened = writer.start(len(call.sample.prompt_ids or ())) + content, True
            if first:
                await call.begin()
            if content:
                await response.write(content)
            if first and call.sample.first_at is not None:
                self._metrics.first_token(time.monotonic() - call.sample.first_at)
                first = False
        if not opened:
            await response.write(writer.start(len(call.sample.prompt_ids or ())))

    async def _completed(self, exchange: Exchange, growing: GrowingReply) -> str:
        call, response, writer = exchange.call, exchange.response, exchange.writer
        reply, sample = growing.whole(), call.sample
        prompt_tokens = len(sample.prompt_ids or ())
        end = ended(sample, prompt_tokens, exchange.sampling.finish_reason, bool(reply.tool_calls))
        exchange.use.sampled(len(sample.ids))
        self._metrics.tokens(prompt_tokens, len(sample.ids))
        if exchange.sampling.finish_reason == "abort":
            return await self._aborted(exchange, growing, end)
        await call.complete(reply, end, end.finish_reason)
        await response.look()
        if call.request.streamed:
            await response.write(writer.end(end))
        else:
            await response.whole(200, writer.whole(reply, end))
        self._metrics.total(time.monotonic() - exchange.sampling.last_news)
        delivered = await response.finish() and not call.stop.is_set
        await call.ending.delivery(delivered)
        return "completed" if delivered else "undelivered"

    async def _aborted(self, exchange: Exchange, growing: GrowingReply, end: Ended) -> str:
        """A part of a response is on the log, and trained by nobody."""
        call = exchange.call
        why = call.stop.why or session_ended()
        if why.infrastructure or not call.sample.ids:
            raise why
        await call.complete(growing.whole(), end, "abort")
        await self._show(exchange, why)
        await call.ending.delivery(False)
        return why.reason

    async def _failed(self, exchange: Exchange, error: Exception) -> str:
        failure, call = classify(error), exchange.call
        if call.planned or not isinstance(error, EngineUnavailable):
            await call.refuse(failure)
        await self._show(exchange, failure)
        return failure.reason

    async def _show(self, exchange: Exchange, failure: Failure) -> None:
        response = exchange.response
        if not response.started:
            content = exchange.dialect.error(failure.status, failure.detail, code=failure.reason)
            await response.whole(failure.status, content, failure.headers)
        elif exchange.call.request.streamed:
            await response.write(exchange.writer.failed(failure.status, failure.detail, failure.reason))
        await response.finish()
