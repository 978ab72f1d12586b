"""One model call, from its rendering to its delivery, with its events on ``polar.sessions``.

call.started is on its way to Kafka before the client sees a token, and at the latest when the engine has worked for a
few milliseconds; call.completed is acknowledged before the client sees the end of the response; call.delivery says
afterwards whether it saw it. Where Kafka does not answer at once, a client sees nothing of a call whose start is not
acknowledged. A call that gives no exact sample ends in call.failed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec
import numpy as np

from gateway_app.dialects.dialect import Ended, ModelRequest, Reply
from gateway_app.digests import Conversation, conversation
from gateway_app.failures import Failure
from gateway_app.history import AttemptHistory, Base, Match, Turn
from gateway_app.sampling.sample import InexactSample, Sample
from gateway_app.stopping import Stop
from polar.session_token import SessionToken, without_token
from schemas.ids import new_id
from schemas.packed import pack_ids, pack_logprobs
from schemas.record import Record
from schemas.sessions import CallCompleted, CallDelivery, CallFailed, CallStarted, Sampling, SessionEvent
from streams.errors import StreamError
from streams.topics import SESSIONS

log = logging.getLogger(__name__)

BEGIN_S = 0.0015
"""After the engine was asked: both work at the same time, and nobody has seen anything of the call yet."""


class Log(Protocol):
    """Where events go: Kafka's producer. ``flowing``: whether it acknowledges without delay."""

    @property
    def flowing(self) -> bool: ...

    async def post(self, topic: str, record: Record) -> asyncio.Future[Any]:
        """Puts a record into its place; the future ends with the acknowledgement. Raises StreamError."""
        ...


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call before anything is rendered. ``secret``: whether the request holds the session token."""

    token: SessionToken
    dialect: str
    auxiliary: str | None = None
    thread_id: str | None = None
    parent_call_id: str | None = None
    secret: bool = False


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """How a call begins. ``ids`` is None where the engine tells them only with its answer."""

    ids: list[int] | None
    sampling: Sampling
    exact: bool = False
    note: str | None = None
    base: Base | None = None
    """Of an exact prompt: the turn whose ids it goes on from."""


class Ending(msgspec.Struct, frozen=True):
    """Records the delivery of a call, which may come long after the call."""

    log: Any
    session_id: str
    attempt: int
    call_id: str

    async def delivery(self, delivered: bool) -> None:
        """Puts on its way whether a client has the end of the response."""
        record = CallDelivery(
            session_id=self.session_id, attempt=self.attempt, call_id=self.call_id, delivered=delivered
        )
        try:
            (await self.log.post(SESSIONS, record)).add_done_callback(self._check)
        except StreamError as error:
            log.error("call %s: its delivery is not recorded: %s", self.call_id, error)

    def _check(self, acknowledged: asyncio.Future[Any]) -> None:
        if not acknowledged.cancelled() and (error := acknowledged.exception()) is not None:
            log.error("call %s: its delivery is not recorded: %s", self.call_id, error)


class Call:
    """``chat_request`` is what the engine is asked; ``stop`` ends the call early."""

    def __init__(
        self,
        log: Log,
        about: About,
        *,
        history: AttemptHistory,
        request: ModelRequest,
        chat_request: dict[str, Any],
        stop: Stop,
    ) -> None:
        self.call_id = new_id()
        self.about = about
        self.history = history
        self.request = request
        self.chat_request = chat_request
        self.stop = stop
        self.sample = Sample()
        self.talk: Conversation = conversation(request.messages, request.tools, chat_request)
        self.match: Match | None = history.match(self.talk)
        self._log = log
        self._prompt: Prompt | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beginning: asyncio.Task[None] | None = None
        self.note: str | None = None
        """Why its prompt is the template's though its history is ours."""
        self._turn: Turn | None = None
        self._started: asyncio.Future[Any] | None = None

    def plan(self, prompt: Prompt) -> None:
        """The engine has been asked: call.started goes on its way in a moment, or with ``begin``."""
        self._prompt, self.note = prompt, prompt.note
        self._timer = asyncio.get_running_loop().call_later(BEGIN_S, self._begin_once)

    @property
    def planned(self) -> bool:
        """Whether the engine was asked since it was last away."""
        return self._prompt is not None

    async def begin(self) -> None:
        """Returns when call.started is on its way. Raises StreamError."""
        await self._begin_once()

    def _begin_once(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin(self._prompt or Prompt(ids=[], sampling=Sampling())))
        return self._beginning

    async def _begin(self, prompt: Prompt) -> None:
        ids = None if prompt.ids is None else np.array(prompt.ids, dtype=np.int32)
        base = prompt.base or (
            self.history.text_base(self.talk, self.match)
            if ids is None
            else self.history.base(self.talk, ids, self.match)
        )
        self._started = await self._post(self._start_event(prompt, ids, base), self.about.secret)
        if ids is not None:
            self._turn = self.history.add(self.call_id, self.talk, ids, base)

    async def may_show(self) -> None:
        """Returns at once while Kafka answers at once, else when the start is acknowledged. Raises StreamError."""
        if not self._log.flowing:
            await self.begin()
            await self._on_record()

    async def _on_record(self) -> None:
        """Returns once call.started is acknowledged. Raises StreamError."""
        if self._started is not None:
            started, self._started = self._started, None
            await started

    async def complete(self, reply: Reply, ended: Ended, finish_reason: str) -> None:
        """Checks the sample, records it and waits for the acknowledgements. Raises InexactSample, StreamError."""
        self.sample.check()
        await self.begin()
        prompt: dict[str, Any] = {}
        turn = self._turn
        if turn is None:
            ids = np.array(self.sample.prompt_ids, dtype=np.int32)
            base = self.history.base(self.talk, ids, self.match)
            turn = self.history.add(self.call_id, self.talk, ids, base)
            prompt = {"prompt_ids": pack_ids(turn.tail), "kept_ids": turn.kept}
            prompt["base_call_id"] = turn.parent.call_id if turn.parent else None
            self._turn = turn
        try:
            event = CallCompleted(
                **self._named,
                message=reply.message(),
                response_ids=pack_ids(self.sample.ids),
                logprobs=pack_logprobs(self.sample.logprobs),
                finish_reason=finish_reason,
                stop_reason=self.sample.stop_reason,
                weight_versions=self.sample.spans,
                usage={
                    "prompt_tokens": ended.usage.prompt,
                    "completion_tokens": ended.usage.completion,
                    "cached_tokens": ended.usage.cached,
                },
                **prompt,
            )
        except ValueError as error:
            raise InexactSample(str(error)) from error
        acknowledged = await self._post(event, self._shows_token(reply))
        await self._on_record()
        await acknowledged
        self.history.extend(turn, self.talk, reply, self.sample.ids, self._ended_its_turn)

    @property
    def ending(self) -> Ending:
        return Ending(self._log, self._session, self.about.token.attempt, self.call_id)

    async def fail(self, failure: Failure) -> None:
        """Records that there is no sample. Without Kafka the call has no end on the log, and counts as lost."""
        if self._turn is not None:
            self.history.discard(self._turn)
        whole = CallFailed(
            **self._named, reason=failure.reason, infrastructure=failure.infrastructure, detail=failure.detail
        )
        hidden = without_token(whole, self.about.token)
        record = msgspec.structs.replace(hidden, detail=hidden.detail[:2000])
        log.warning("call %s of session %s failed: %s: %s", self.call_id, self._session, record.reason, record.detail)
        try:
            acknowledged = await self._post(record, False)
            await self._on_record()
            await acknowledged
        except StreamError as error:
            log.error("call %s: its failure is not recorded: %s", self.call_id, error)

    async def away(self, failure: Failure) -> None:
        """While the engine is away the log has a failed call in place of this one, which goes on under a new id."""
        await self.refuse(failure)
        old, self.call_id = self.call_id, new_id()
        self._beginning = self._turn = self._prompt = None
        self.history.renamed(old, self.call_id)

    async def refuse(self, failure: Failure) -> None:
        """Records a call that fails, whether it has begun or not."""
        try:
            await self.begin()
        except StreamError as error:
            log.error("call %s: its failure is not recorded: %s", self.call_id, error)
            return
        await self.fail(failure)

    @property
    def _ended_its_turn(self) -> bool:
        """Whether the reply ends with the token that ends turns, and not with one that the request asked for."""
        asked = self.chat_request.get("stop_token_ids") or []
        return self.sample.ended_by_token and self.sample.stop_reason not in asked

    @property
    def _session(self) -> str:
        return self.about.token.session_id

    @property
    def _named(self) -> dict[str, Any]:
        return {"session_id": self._session, "attempt": self.about.token.attempt, "call_id": self.call_id}

    async def _post(self, event: SessionEvent, secret: bool) -> asyncio.Future[Any]:
        return await self._log.post(SESSIONS, without_token(event, self.about.token) if secret else event)

    def _shows_token(self, reply: Reply) -> bool:
        raw = self.about.token.raw
        texts = [reply.content, reply.reasoning, *(f"{call.name} {call.arguments}" for call in reply.tool_calls)]
        return any(raw in text for text in texts if text)

    def _start_event(self, prompt: Prompt, ids: Any, base: Base | None) -> CallStarted:
        kept_messages, kept_ids = (base.kept_messages, base.kept_ids) if base else (0, 0)
        parent = self.about.parent_call_id or (self.match.turn.call_id if self.match else None)
        return CallStarted(
            **self._named,
            number=self.history.take_number(),
            dialect=self.about.dialect,
            model=self.request.model,
            streamed=self.request.streamed,
            messages=self.request.messages[kept_messages:],
            tools=None if base and base.turn.root == self.talk.chain[0] else self.request.tools,
            prompt_ids=None if ids is None else pack_ids(ids[kept_ids:]),
            sampling=prompt.sampling,
            base_call_id=base.turn.call_id if base else None,
            kept_messages=kept_messages,
            kept_ids=kept_ids,
            history="exact" if prompt.exact else "template",
            history_note=prompt.note,
            auxiliary=self.about.auxiliary,
            parent_call_id=parent,
            thread_id=self.about.thread_id,
        )
