"""``python -m gateway_app.gateway``: the model API that agent programs are pointed at, at ``/s/<session token>/v1``.

Each call is sampled by the engine and captured on ``polar.sessions``. What may call is followed on ``polar.scheduler``,
which is read from its beginning before the first request is served.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway_app.answers import answer, refuse, session_ended
from gateway_app.attempts import Attempts
from gateway_app.capture import Capture, Failure
from gateway_app.client import Client
from gateway_app.dialects.openai_chat import BadRequest, OpenAIChat
from gateway_app.following import Follower, call_numbers
from gateway_app.history import Histories
from gateway_app.serve import ListenError, listen, serve, stop_on_signals
from polar.engine.client import EngineClient, EngineError
from polar.session_token import InvalidToken, SessionToken, load_secret, verify
from polar.settings import Settings, SettingsError, from_environment
from streams.errors import StreamError
from streams.producer import Producer

log = logging.getLogger("gateway")

ENGINE_HOLD_S = 60.0
"""Less than the 120 s after which the least patient agent program gives up on a response without headers."""
MAX_BODY = 64 * 1024 * 1024
PUBLISH_S = 15.0


class Gateway:
    """What the routes share."""

    def __init__(
        self, capture: Capture, attempts: Attempts, histories: Histories, follower: Follower, secret: str
    ) -> None:
        self.engine = capture.engine
        self.capture = capture
        self.attempts = attempts
        self.histories = histories
        self.follower = follower
        self._secret = secret

    def admit(self, token: str) -> SessionToken:
        """Raises Failure: 401 for no valid token, 403 for an attempt that has ended."""
        try:
            session = verify(self._secret, token)
        except InvalidToken as error:
            raise Failure("invalid_session_token", str(error), 401, infrastructure=False) from None
        if self.attempts.ended(session.session_id, session.attempt):
            raise session_ended()
        return session

    async def chat(self, token: str, content: bytes, receive: Receive, send: Send) -> None:
        """One chat completion, from the token to its delivery."""
        stop = asyncio.Event()
        async with Client(receive, send, stop) as client:
            try:
                session = self.admit(token)
                request = OpenAIChat.parse(content)
                with self.attempts.stopping(session.session_id, session.attempt, stop):
                    history = self.histories.of(session.session_id, session.attempt)
                    call = await self.capture.start(session, history, request, OpenAIChat.name, stop)
                    await answer(self.engine, call, request, client)
            except BadRequest as error:
                await client.respond(400, OpenAIChat.error(400, str(error), param=error.param))
            except Failure as failure:
                await refuse(client, failure)
            await client.end()


@post("/s/{token:str}/v1/chat/completions")
async def chat_completions(token: FromPath[str], request: Request[Any, Any, Any]) -> ASGIApp:
    content = await request.body()
    gateway: Gateway = request.app.state.gateway

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await gateway.chat(token, content, receive, send)

    return respond


@get("/v1/models")
async def models(request: Request[Any, Any, Any]) -> Response[Any]:
    try:
        return Response(await request.app.state.gateway.engine.models())
    except EngineError as error:
        raise HTTPException(status_code=503, detail=str(error), headers={"retry-after": "2"}) from error


@get("/s/{token:str}/v1/models")
async def session_models(token: FromPath[str], request: Request[Any, Any, Any]) -> Response[Any]:
    try:
        request.app.state.gateway.admit(token)
    except Failure as failure:
        raise HTTPException(status_code=failure.status, detail=failure.detail, extra={"code": failure.reason}) from None
    return await models.fn(request)


@get("/health")
async def health(request: Request[Any, Any, Any]) -> Response[Any]:
    """200 while it knows which attempts have ended; ``engine`` says whether the engine is alive, too."""
    gateway: Gateway = request.app.state.gateway
    if not gateway.follower.alive:
        return Response({"status": "the scheduler's log is no longer followed: see the log"}, status_code=503)
    return Response({"status": "ok", "engine": await gateway.engine.healthy()})


def openai_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    extra = error.extra if isinstance(error.extra, dict) else {}
    content = OpenAIChat.error(error.status_code, error.detail, code=extra.get("code"))
    return Response(content, status_code=error.status_code, headers=error.headers, media_type="application/json")


def create_app(gateway: Gateway) -> Litestar:
    app = Litestar(
        [chat_completions, models, session_models, health],
        exception_handlers={HTTPException: openai_error},
        request_max_body_size=MAX_BODY,
        openapi_config=None,
        logging_config=None,
    )
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def gateway(
    settings: Settings,
    *,
    hold_s: float = ENGINE_HOLD_S,
    publish_s: float = PUBLISH_S,
    on_failure: Callable[[Exception], None] = lambda error: None,
) -> AsyncIterator[Gateway]:
    """A gateway that is connected and has read who may call. Raises StreamError when Kafka is away.

    ``on_failure`` is told when it can no longer follow who may call: the process should end, and start again.
    """
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EngineClient(settings.engine_url))
        producer = Producer(settings.kafka_bootstrap, source="gateway", deadline_s=publish_s)
        await stack.enter_async_context(producer)
        histories = Histories()
        attempts = Attempts(on_end=histories.drop)
        follower = await stack.enter_async_context(Follower(settings.kafka_bootstrap, attempts, on_failure))
        histories.resume(await call_numbers(settings.kafka_bootstrap, attempts.live()))
        capture = Capture(engine, producer, policy=settings.policy, hold_s=hold_s)
        yield Gateway(capture, attempts, histories, follower, load_secret(settings))


async def run(settings: Settings) -> None:
    """Returns after SIGTERM or SIGINT. Raises ListenError, and StreamError when who may call is not known any more."""
    stop, failures = stop_on_signals(), list[Exception]()

    def failed(error: Exception) -> None:
        failures.append(error)
        stop.set()

    with listen(settings.gateway_host, settings.gateway_port) as listening:
        async with gateway(settings, on_failure=failed) as ready:
            log.info("listening at %s:%d", settings.gateway_host, settings.gateway_port)
            await serve(create_app(ready), listening, stop)
    for error in failures:
        raise StreamError(f"the scheduler's log is no longer followed: {error}") from error


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="gateway: %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        asyncio.run(run(from_environment()))
    except (SettingsError, ListenError, StreamError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
