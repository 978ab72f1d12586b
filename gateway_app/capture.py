"""One model call from its rendering to its delivery, with its events on ``polar.sessions``.

call.started is acknowledged by Kafka before the engine samples; call.completed before the client sees the end of the
response; call.delivery says afterwards whether it saw it. A call that gives no exact sample ends in call.failed. While
a request waits for an engine that is away, the log already says so: nobody may take the wait for the agent's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from gateway_app.dialects.openai_chat import ChatRequest
from gateway_app.history import AttemptHistory, PastCall
from gateway_app.sample import InexactSample, Sample, effective_sampling
from polar.engine.client import EngineClient, EngineError, EngineFault, EngineRefused, EngineUnavailable
from polar.session_token import SessionToken, without_token
from schemas.ids import new_id
from schemas.packed import pack_ids
from schemas.sessions import CallDelivery, CallFailed, CallStarted, Sampling, SessionEvent
from streams.errors import KafkaUnavailable, StreamError
from streams.producer import Producer
from streams.topics import SESSIONS

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
PACE_S = 0.05
"""Between two pieces of one response: the engine parses a response from its start for each piece."""
ABORT_S = 5.0
RETRY_S = 0.5
"""Between two tries at an engine that is away."""

T = TypeVar("T")


class Failure(Exception):
    """Why a call gave no response, as the record and as the client see it."""

    def __init__(self, reason: str, detail: str, status: int, *, infrastructure: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.status = status
        self.infrastructure = infrastructure


def classify(error: Exception) -> Failure:
    """The one place that says what each boundary's error means."""
    match error:
        case EngineRefused():
            return Failure("request_refused", str(error), error.status, infrastructure=False)
        case EngineUnavailable():
            return Failure("engine_unavailable", str(error), 503, infrastructure=True)
        case KafkaUnavailable():
            return Failure("kafka_unavailable", "the call cannot be recorded at the moment", 503, infrastructure=True)
        case StreamError():
            return Failure("record_refused", str(error), 502, infrastructure=True)
        case InexactSample():
            return Failure("inexact_sample", str(error), 502, infrastructure=True)
    return Failure("engine_fault", str(error), 502, infrastructure=True)


class Piece(msgspec.Struct, frozen=True):
    """Tokens with text that arrived since the last piece; the last piece has the finish reason."""

    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None

    def choice(self) -> dict[str, Any]:
        """In the engine's shape."""
        return msgspec.structs.asdict(self)


class Capture:
    """Starts calls. ``hold_s``: how long a call waits for an engine that is away."""

    def __init__(self, engine: EngineClient, producer: Producer, *, policy: str, hold_s: float) -> None:
        self.engine = engine
        self.producer = producer
        self._policy = policy
        self._hold_s = hold_s

    async def start(
        self, token: SessionToken, history: AttemptHistory, request: ChatRequest, dialect: str, stop: asyncio.Event
    ) -> Call:
        """Renders and records the call. Raises Failure, after recording that too where it can."""
        call = Call(self, token, history, request.for_engine(self._policy), stop)
        try:
            rendered = await self._render(call, request, dialect)
        except EngineUnavailable as error:
            raise classify(error) from error
        except EngineError as error:
            failure = classify(error)
            await self._record_failed(call, request, dialect, failure)
            raise failure from error
        call.body = rendered | {"request_id": call.call_id}
        call.prompt_ids = rendered["token_ids"]
        call.sample = Sample(call.prompt_ids)
        await self._publish(call, _started(call, request, dialect, effective_sampling(rendered["sampling_params"])))
        call.past = PastCall(call.call_id, request.messages, request.tools, np.array(call.prompt_ids, dtype=np.int32))
        history.add(call.past)
        return call

    async def _render(self, call: Call, request: ChatRequest, dialect: str) -> dict[str, Any]:
        """While the engine is away, the log has a failed call in place of this one, which goes on under a new id."""

        async def ask() -> dict[str, Any]:
            return await self.engine.render(call.chat_request)

        try:
            return await ask()
        except EngineUnavailable as error:
            await self._record_failed(call, request, dialect, classify(error))
            call.call_id = new_id()
            return await self.held(ask, call.stop)

    async def held(
        self, ask: Callable[[], Awaitable[T]], stop: asyncio.Event, worth_waiting: Callable[[], bool] = lambda: True
    ) -> T:
        """Asks each half second while the engine is away and it is worth it.

        Raises EngineUnavailable once ``hold_s`` has passed or ``stop`` is set.
        """
        deadline = time.monotonic() + self._hold_s
        while True:
            try:
                return await ask()
            except EngineUnavailable:
                if time.monotonic() >= deadline or not worth_waiting() or await _set_within(stop, RETRY_S):
                    raise

    async def _record_failed(self, call: Call, request: ChatRequest, dialect: str, failure: Failure) -> None:
        await self._publish(call, _started(call, request, dialect, None))
        await call.fail(failure)

    async def _publish(self, call: Call, started: CallStarted) -> None:
        try:
            await call.record(started)
        except StreamError as error:
            raise classify(error) from error


class Call:
    """A call that is being sampled. ``stop`` ends it early: the client has left, or the attempt has ended."""

    body: dict[str, Any]
    prompt_ids: list[int]
    sample: Sample
    past: PastCall

    def __init__(
        self,
        capture: Capture,
        token: SessionToken,
        history: AttemptHistory,
        chat_request: dict[str, Any],
        stop: asyncio.Event,
    ) -> None:
        self.call_id = new_id()
        self.session_id = token.session_id
        self.attempt = token.attempt
        self.history = history
        self.chat_request = chat_request
        self.stop = stop
        self._token = token
        self._capture = capture
        self._news = asyncio.Event()
        self._away: EngineError | None = None

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """What is sampled, as it comes; None where nothing came for a while. Close it to end the sampling.

        Raises EngineError, InexactSample, or Failure where a stopped call did not end in time.
        Tokens that arrive while a piece is in the consumer's hands come together in the next one.
        """
        reading = asyncio.create_task(self._read())
        stopping = asyncio.create_task(self._abort_on_stop(reading))
        taken = 0
        try:
            while True:
                done = reading.done()
                fresh = self.sample.ids[taken : self.sample.shown]
                if done or (fresh and not self.withheld):
                    taken += len(fresh)
                    finish = self.sample.finish_reason if done else None
                    if fresh or finish:
                        yield Piece(fresh, finish, self.sample.stop_reason if done else None)
                    if done:
                        break
                    await asyncio.wait({reading}, timeout=PACE_S)
                elif await _set_within(self._news, KEEP_ALIVE_S):
                    self._news.clear()
                else:
                    yield None
            if reading.cancelled():
                raise self._cut_off()
            await reading
        finally:
            stopping.cancel()
            reading.cancel()
            await asyncio.gather(stopping, reading, return_exceptions=True)

    @property
    def withheld(self) -> bool:
        """Whether text waits for the end: a stop string is cut off, and may be in several tokens."""
        return bool(self.body["sampling_params"].get("stop"))

    def cut_at_stop(self, message: dict[str, Any]) -> dict[str, Any]:
        """``message`` without the stop string that ended the response, and without what its last token has after it."""
        stop, content = self.sample.stop_reason, message.get("content")
        if not isinstance(stop, str) or not content:
            return message
        return message | {"content": content.partition(stop)[0]}

    async def record(self, event: SessionEvent) -> None:
        """Puts an event on the log, without the session token; the ids stay what they are. Raises StreamError."""
        await self._capture.producer.send(SESSIONS, without_token(event, self._token))

    async def complete(self, message: dict[str, Any], finish_reason: str) -> None:
        """Checks the sample, records it and waits for the acknowledgement. Raises InexactSample, StreamError."""
        if finish_reason == "abort" and not self.stop.is_set():
            raise EngineFault("the engine ended the call before its time")
        completed = self.sample.checked(self.session_id, self.attempt, self.call_id, message, finish_reason)
        await self.record(completed)
        self.past.extend(message, self.sample.ids)

    async def delivery(self, delivered: bool) -> None:
        """Records whether the client has the end of the response."""
        record = CallDelivery(
            session_id=self.session_id, attempt=self.attempt, call_id=self.call_id, delivered=delivered
        )
        try:
            await self.record(record)
        except StreamError as error:
            log.error("call %s: its delivery is not recorded: %s", self.call_id, error)

    async def fail(self, failure: Failure) -> None:
        """Records that there is no sample. Without Kafka the call has no end on the log, and counts as lost."""
        whole = CallFailed(
            session_id=self.session_id,
            attempt=self.attempt,
            call_id=self.call_id,
            reason=failure.reason,
            infrastructure=failure.infrastructure,
            detail=failure.detail,
        )
        hidden = without_token(whole, self._token)
        record = msgspec.structs.replace(hidden, detail=hidden.detail[:2000])
        log.warning("call %s of session %s failed: %s: %s", self.call_id, self.session_id, record.reason, record.detail)
        try:
            await self.record(record)
        except StreamError as error:
            log.error("call %s: its failure is not recorded: %s", self.call_id, error)

    async def _read(self) -> None:
        async def sample() -> None:
            try:
                async for chunk in self._capture.engine.generate(self.body):
                    self._away = None
                    self.sample.take(chunk)
                    self._news.set()
            except EngineUnavailable as error:
                self._away = error
                raise

        try:
            await self._capture.held(sample, self.stop, lambda: not self.sample.ids)
        finally:
            self._news.set()

    async def _abort_on_stop(self, reading: asyncio.Task[None]) -> None:
        """An aborted stream ends with its weight versions; a cut one would not."""
        await self.stop.wait()
        try:
            await self._capture.engine.abort(self.call_id)
            await asyncio.wait({reading}, timeout=ABORT_S)
        except EngineError as error:
            self._away = error
        reading.cancel()

    def _cut_off(self) -> Failure:
        """Of a stopped call that the engine did not end: an engine that was away is at fault, not who stopped it."""
        if self._away is not None:
            return Failure("engine_unavailable", str(self._away), 503, infrastructure=True)
        return Failure("stopped", "the call was stopped and the engine did not end it", 503, infrastructure=False)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _started(call: Call, request: ChatRequest, dialect: str, sampling: Sampling | None) -> CallStarted:
    """The record of a call; one that could not be rendered has no prompt ids."""
    ids = np.array(call.prompt_ids if sampling else [], dtype=np.int32)
    base = call.history.base_of(request.messages, ids)
    kept_ids, kept_messages = (base.kept_ids, base.kept_messages) if base else (0, 0)
    return CallStarted(
        session_id=call.session_id,
        attempt=call.attempt,
        call_id=call.call_id,
        number=call.history.take_number(),
        dialect=dialect,
        model=request.model,
        streamed=request.streamed,
        messages=request.messages[kept_messages:],
        tools=None if base and base.call.tools == request.tools else request.tools,
        prompt_ids=pack_ids(ids[kept_ids:]),
        sampling=sampling or Sampling(),
        base_call_id=base.call.call_id if base else None,
        kept_messages=kept_messages,
        kept_ids=kept_ids,
    )
