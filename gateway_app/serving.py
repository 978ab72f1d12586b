"""Every request to the gateway, from its target to its end: who may call, in which dialect, for which session."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from gateway_app.answers import Answers, Exchange
from gateway_app.attempts import Attempts
from gateway_app.auxiliary import auxiliary, threads
from gateway_app.budgets import Budgets, OverBudget, Use
from gateway_app.call import About, Call, Log
from gateway_app.client import Client, Receive, Send, TooLarge, read_body
from gateway_app.dialects import DIALECTS, GOOGLE_ARRAY
from gateway_app.dialects.dialect import BadRequest, Dialect, ModelRequest
from gateway_app.failures import Failure, classify, session_ended
from gateway_app.fixed_sampling import fix
from gateway_app.history import Histories
from gateway_app.metrics import Metrics
from gateway_app.response import EVENTS, JSON, Response, Responses
from gateway_app.routes import Refusal, Target, resolve
from gateway_app.sampling.sampler import Sampler
from gateway_app.stopping import Stop
from polar.engine.client import EngineError
from polar.session_token import InvalidToken, SessionToken, verify

MAX_BODY = 64 * 1024 * 1024


class Asked(msgspec.Struct, frozen=True):
    """One request to sample."""

    session: SessionToken
    dialect: Dialect
    request: ModelRequest
    content: bytes
    headers: dict[bytes, bytes]

    @property
    def key(self) -> bytes:
        """What makes two requests the same. A program's retry is the same, byte for byte."""
        named = f"{self.session.session_id} {self.session.attempt} {self.dialect.name} {self.request.streamed} "
        named += f"{self.request.model} {self.dialect is GOOGLE_ARRAY} "
        return blake2b(named.encode() + self.content, digest_size=16).digest()


class Serving:
    """What all requests share. Calls of ``attempts`` that have ended are refused."""

    def __init__(
        self, sampler: Sampler, log: Log, attempts: Attempts, metrics: Metrics, *, secret: str, stall_s: float
    ) -> None:
        self.attempts = attempts
        self.histories = Histories()
        self.budgets = Budgets()
        self.metrics = metrics
        self.answers = Answers(self.metrics, stall_s)
        self._sampler = sampler
        self._log = log
        self._secret = secret
        self._responses = Responses()
        attempts.on_end = self._ended

    async def handle(self, scope: Any, receive: Receive, send: Send) -> None:
        """One HTTP request, as an ASGI application."""
        headers = dict(scope["headers"])
        target = resolve(scope["method"], scope["path"], scope["query_string"].decode("latin-1"), headers)
        dialect = GOOGLE_ARRAY if isinstance(target, Target) and target.array else DIALECTS[target.dialect]
        try:
            if isinstance(target, Refusal):
                raise Failure(target.code, target.message, target.status)
            if target.operation in ("hello", "models"):
                await self._tell(target, dialect, receive, send)
                return
            session = self.admit(target.token or "")
            content = await read_body(receive, MAX_BODY)
            if content is None:
                return
            request = dialect.parse(content, target.model, target.streamed)
            request = msgspec.structs.replace(request, options=fix(request.options, session.sampling))
            if target.operation == "count":
                counted = dialect.count(await self._sampler.count(request))
                await _respond(receive, send, 200, counted)
            else:
                await self._sample(Asked(session, dialect, request, content, headers), receive, send)
        except BadRequest as error:
            await self._refuse(dialect, Failure("bad_request", str(error), 400), receive, send, error.param)
        except TooLarge:
            await self._refuse(dialect, _too_large(), receive, send)
        except OverBudget as error:
            await self._refuse(dialect, Failure(error.code, str(error), error.status), receive, send)
        except (Failure, EngineError) as error:
            await self._refuse(dialect, classify(error), receive, send)

    def admit(self, token: str) -> SessionToken:
        """Raises Failure: 401 for no valid token, 403 for an attempt that has ended."""
        try:
            session = verify(self._secret, token)
        except InvalidToken as error:
            raise Failure("invalid_session_token", str(error), 401) from None
        if self.attempts.ended(session.session_id, session.attempt):
            raise session_ended()
        return session

    def resume(self, numbers: dict[tuple[str, int], int]) -> None:
        """``numbers``: the next call number of each live (session, attempt), after a restart."""
        self.histories.resume(numbers)
        self.budgets.resume(numbers)

    async def _sample(self, asked: Asked, receive: Receive, send: Send) -> None:
        async with Client(receive, send) as client:
            response = self._responses.find(asked.key)
            if response is not None:
                self.metrics.repeated("replayed" if response.ended else "joined")
                await self._repeat(asked.key, response, client)
            else:
                session = asked.session
                with self.budgets.admit(session.session_id, session.attempt, session.budget) as use:
                    await self._answer(asked, client, use)
            await client.end()

    async def _answer(self, asked: Asked, client: Client, use: Use) -> None:
        stop, keep = Stop(), None
        streamed = JSON if asked.dialect is GOOGLE_ARRAY else EVENTS
        response = Response(client, stop, streamed=streamed)
        self._responses.add(asked.key, response)
        try:
            with self.attempts.stopping(asked.session.session_id, asked.session.attempt, stop):
                call = self._call(asked, stop, use.tokens_left)
                writer = asked.dialect.writer(asked.request, call.call_id)
                sampling = self._sampler.sampling(call)
                exchange = Exchange(
                    call=call, sampling=sampling, dialect=asked.dialect, writer=writer, response=response, use=use
                )
                keep = call.ending if await self.answers.answer(exchange) else None
        finally:
            response.close()
            self._responses.settle(asked.key, response, keep=keep)

    async def _repeat(self, key: bytes, response: Response, client: Client) -> None:
        """The same sample again. One that nobody had received is delivered now."""
        if await response.follow(client) and response.kept is not None:
            self._responses.delivered(key)
            await response.kept.delivery(True)

    def _call(self, asked: Asked, stop: Stop, tokens_left: int | None) -> Call:
        session, name, request = asked.session, asked.dialect.name, asked.request
        history = self.histories.of(session.session_id, session.attempt)
        thread = threads(asked.headers, name)
        about = About(
            token=session,
            dialect=name,
            auxiliary=auxiliary(request, asked.headers, name, history.seen),
            thread_id=thread.id if thread else None,
            parent_call_id=history.last_call(thread.parent_id) if thread and thread.parent_id else None,
            secret=session.raw.encode() in asked.content,
        )
        chat = self._sampler.chat_request(request)
        if tokens_left is not None:
            chat["max_tokens"] = min(chat.get("max_tokens") or tokens_left, tokens_left)
        call = Call(self._log, about, history=history, request=request, chat_request=chat, stop=stop)
        history.note(call.call_id, request, about.thread_id, turn=about.auxiliary is None)
        if about.auxiliary:
            self.metrics.auxiliary(about.auxiliary)
        return call

    async def _tell(self, target: Target, dialect: Dialect, receive: Receive, send: Send) -> None:
        if target.token is not None:
            self.admit(target.token)
        if target.operation == "hello":
            await _respond(receive, send, 200, b'{"status":"ok"}')
        else:
            await _respond(receive, send, 200, await self._sampler.models(target.dialect, target.model))

    async def _refuse(
        self, dialect: Dialect, failure: Failure, receive: Receive, send: Send, param: str | None = None
    ) -> None:
        self.metrics.refused(failure.reason)
        content = dialect.error(failure.status, failure.detail, code=failure.reason, param=param)
        await _respond(receive, send, failure.status, content, failure.headers)

    def _ended(self, session_id: str, attempt: int) -> None:
        self.histories.drop(session_id, attempt)
        self.budgets.drop(session_id, attempt)
        self._responses.drop(session_id, attempt)


async def _respond(
    receive: Receive, send: Send, status: int, content: bytes, headers: dict[str, str] | None = None
) -> None:
    async with Client(receive, send) as client:
        length = {"content-type": "application/json", "content-length": str(len(content))}
        await client.start(status, length | (headers or {}))
        await client.write(content)
        await client.end()


def _too_large() -> Failure:
    return Failure("request_too_large", f"the body is larger than {MAX_BODY // 2**20} MiB", 413)
