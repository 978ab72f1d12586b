"""The scripted engine: vLLM's endpoints without a model. What it replies, and what goes wrong, a test decides."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from scripted_engine.answers import Asked, ChatAnswer
from scripted_engine.derendering import derender
from scripted_engine.outcome import outcome, stop_strings
from scripted_engine.plans import Fault, Plan, Script, Turn, always
from scripted_engine.refusals import (
    Refusal,
    check_chat,
    check_derender,
    check_generate,
    check_length,
    check_sampling,
    check_top_logprobs,
    missing,
    not_json,
    wrong_media_type,
)
from scripted_engine.rendering import model_list, rendered, sampling_of
from scripted_engine.run import Run
from scripted_engine.server import Connection, Request
from scripted_engine.template import Template
from scripted_engine.token_answers import GenerateAnswer
from scripted_engine.tokens import VOCABULARY, encode, logprob

CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
GENERATE = "/inference/v1/generate"
ENDPOINTS = {"chat": CHAT, "render": RENDER, "derender": DERENDER, "generate": GENERATE}

Json = dict[str, Any]


class Received(msgspec.Struct, frozen=True):
    """A request that came; ``body`` is None where it was no JSON."""

    path: str
    body: Any


class Sampled(msgspec.Struct, frozen=True):
    """What was sampled for one call, up to where it ended: ``finish`` is also left, cut or error."""

    key: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str


class ScriptedEngine:
    """``script`` and ``template`` may be changed at any time. With ``record`` it keeps what it got and sampled."""

    encode = staticmethod(msgspec.json.encode)

    def __init__(
        self,
        script: Script | Plan | None = None,
        *,
        template: Template | None = None,
        model: str = "policy",
        max_model_len: int = 32_768,
        images: bool = False,
        thinks: bool = False,
        record: bool = True,
    ) -> None:
        self.script = always(script) if isinstance(script, Plan) else script or always(Plan(content="done"))
        self.template = template or Template()
        self.model, self.max_model_len, self.images, self.thinks = model, max_model_len, images, thinks
        self.version = "0"
        self.paused = False
        self.record = record
        self.received: list[Received] = []
        self.sampled: list[Sampled] = []
        self.aborted: list[str] = []
        self.left: list[str] = []
        self.running: dict[str, Run] = {}
        self.url = ""
        self._draining: list[Callable[[], None]] = []
        self._keep_running = False
        self._faults: dict[str, deque[Fault]] = {path: deque() for path in ENDPOINTS.values()}
        self._prompts: dict[str, list[int]] = {}
        self._routes: dict[str, dict[str, Callable[[Connection, Request], None]]] = self._table()

    # What a test says and asks

    def fail_next(self, endpoint: str, *faults: Fault) -> None:
        """The next calls of ``endpoint`` (chat, render, derender, generate) meet these, one each."""
        self._faults[ENDPOINTS[endpoint]].extend(faults)

    def bodies(self, endpoint: str) -> list[Any]:
        return [one.body for one in self.received if one.path == ENDPOINTS[endpoint]]

    def prompt(self, messages: list[Json], tools: list[Json] | None = None) -> list[int]:
        """The ids to which the template renders a chat request."""
        return encode(self.template.render(messages, tools, generation=True))

    def pause(self, mode: str = "keep") -> None:
        """As ``/pause``: keep freezes what runs, wait lets it end, abort ends it."""
        self.paused, self._keep_running = True, mode == "wait"
        if mode == "abort":
            for run in list(self.running.values()):
                run.abort()

    def resume(self) -> None:
        self.paused = False
        for run in list(self.running.values()):
            run.resume()

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[ScriptedEngine]:
        self.loop = asyncio.get_running_loop()
        connections: set[Connection] = set()

        def connect() -> Connection:
            connection = Connection(self)
            connections.add(connection)
            return connection

        server = await self.loop.create_server(connect, host, port, backlog=2048)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
        try:
            yield self
        finally:
            server.close()
            for connection in connections:
                connection.transport.abort()

    # What runs

    def holds(self, run: Run) -> bool:
        return self.paused and not (self._keep_running and run.count)

    def ended(self, run: Run) -> None:
        self.running.pop(run.key, None)
        prompt = self._prompts.pop(run.key, [])
        if self.record:
            ids = list(run.outcome.ids[: run.count])
            self.sampled.append(Sampled(run.key, prompt, ids, [logprob(one) for one in ids], run.finish or ""))
        if not self.running:
            drained, self._draining = self._draining, []
            for call in drained:
                call()

    def handle(self, connection: Connection, request: Request) -> None:
        methods = self._routes.get(request.path)
        if methods is None:
            connection.respond(404, b'{"detail":"Not Found"}')
        elif request.method not in methods:
            connection.respond(405, b'{"detail":"Method Not Allowed"}')
        else:
            try:
                methods[request.method](connection, request)
            except Refusal as refusal:
                connection.respond(refusal.status, self.encode(refusal.body))

    def _table(self) -> dict[str, dict[str, Callable[[Connection, Request], None]]]:
        get: dict[str, Callable[[Request], Any]] = {
            "/health": lambda request: None,
            "/version": lambda request: {"version": "scripted"},
            "/v1/models": lambda request: model_list(self.model, self.max_model_len),
            "/weight_info": lambda request: {"weight_version": self.version},
            "/is_paused": lambda request: {"is_paused": self.paused},
        }
        post: dict[str, Callable[[Request], Any]] = {
            "/resume": lambda request: self.resume() or {"status": "resumed"},  # type: ignore[func-returns-value]
            "/reset_prefix_cache": lambda request: {"success": True},
            "/update_weight_version": self._set_version,
            "/inference/v1/abort_requests": self._abort,
            "/tokenize": self._tokenize,
            "/collective_rpc": lambda request: {"results": ["False"]},
            "/init_weight_transfer_engine": lambda request: {"message": "Weight transfer initialized"},
            "/start_weight_update": lambda request: {"message": "Weight update started"},
            "/update_weights": lambda request: {"message": "Weights updated"},
            "/finish_weight_update": self._finish_weights,
        }

        def answered(reply: Callable[[Request], Any]) -> Callable[[Connection, Request], None]:
            def respond(connection: Connection, request: Request) -> None:
                value = reply(request)
                connection.respond(200, b"" if value is None else self.encode(value))

            return respond

        table = {path: {"GET": answered(reply)} for path, reply in get.items()}
        table |= {path: {"POST": answered(reply)} for path, reply in post.items()}
        handlers = {CHAT: self._chat, RENDER: self._render, DERENDER: self._derender, GENERATE: self._generate}
        return (
            table | {path: {"POST": handler} for path, handler in handlers.items()} | {"/pause": {"POST": self._pause}}
        )

    # Endpoints

    def _tokenize(self, request: Request) -> Json:
        body = self._body(request)
        ids = encode(body["prompt"]) if "prompt" in body else self.prompt(body["messages"], body.get("tools"))
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}

    def _set_version(self, request: Request) -> Json:
        body = self._body(request)
        if "new_version" not in body:
            raise missing("new_version", body)
        self.version = str(body["new_version"])
        return {"success": True, "new_version": self.version}

    def _finish_weights(self, request: Request) -> Json:
        self.version = str(self._body(request).get("weight_version", self.version))
        return {"message": "Weight update finished"}

    def _abort(self, request: Request) -> None:
        ids = self._body(request).get("request_ids")
        if ids is None:
            raise Refusal("Missing 'request_ids' in request body", kind="Bad Request")
        self.aborted += ids
        for key in ids:
            if run := self.running.get(key):
                self.loop.call_soon(run.abort)

    def _pause(self, connection: Connection, request: Request) -> None:
        mode = request.query.get("mode", "abort")
        self.pause(mode)

        def answer() -> None:
            connection.respond(200, b'{"status":"paused"}')

        if mode == "wait" and any(run.count for run in self.running.values()):
            self._draining.append(answer)
        else:
            answer()

    def _render(self, connection: Connection, request: Request) -> None:
        body = self._body(request)

        def answer() -> None:
            check_chat(body, self.model, images=self.images)
            ids = self._prompt_of(body)
            connection.respond(200, self.encode(rendered(body, ids, self.model, self._room(ids))))

        self._at(RENDER, connection, answer)

    def _derender(self, connection: Connection, request: Request) -> None:
        body = self._body(request)

        def answer() -> None:
            check_derender(body)
            connection.respond(200, derender(body, self.model, thinks=self.thinks))

        self._at(DERENDER, connection, answer)

    def _at(self, path: str, connection: Connection, answer: Callable[[], None]) -> None:
        """Answers, unless a fault says otherwise."""
        fault = self._faults[path].popleft() if self._faults[path] else None
        if fault is None:
            answer()
            return

        def late() -> None:
            try:
                answer()
            except Refusal as refusal:
                connection.respond(refusal.status, self.encode(refusal.body))

        if fault.kind == "status":
            connection.respond(fault.status, self._failed(fault.status))
        elif fault.kind == "cut":
            connection.abort()
        elif fault.kind != "stall":
            self.loop.call_later(fault.delay_s, late)

    def _chat(self, connection: Connection, request: Request) -> None:
        body = self._body(request)
        check_chat(body, self.model, images=self.images)
        if body.get("logprobs"):
            check_top_logprobs(body.get("top_logprobs"))
        ids = self._prompt_of(body)
        sampling = sampling_of(body, self._room(ids))
        tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        asked = Asked(
            top=(body.get("top_logprobs") or 0) if body.get("logprobs") else None,
            ids=bool(body.get("return_token_ids")),
            tools=tools,
            thinks=self.thinks,
            stop=stop_strings(body),
            **_usage(body),
        )
        plan = self._plan(CHAT, Turn(ids, "chat", body))
        if self._refuses(connection, plan):
            return
        key = f"chatcmpl-{body.get('request_id') or os.urandom(8).hex()}"
        result = outcome(plan, sampling, self._room(ids))
        fault = plan.fault if plan.fault and plan.fault.kind else None
        answer = ChatAnswer(key, self.model, ids, result, asked, fault)
        self._start(connection, Run(self, connection, key, plan, answer, bool(body.get("stream"))), ids)

    def _generate(self, connection: Connection, request: Request) -> None:
        body = self._body(request)
        check_generate(body, self.max_model_len, VOCABULARY)
        if body.get("model") not in (None, self.model):
            check_chat(body | {"messages": [{}]}, self.model, images=True)
        ids, sampling = body["token_ids"], body["sampling_params"]
        asked = Asked(top=sampling.get("logprobs"), ids=bool(body.get("return_token_ids")), **_usage(body))
        plan = self._plan(GENERATE, Turn(ids, "generate", None))
        if self._refuses(connection, plan):
            return
        key = f"generate-tokens-{body.get('request_id') or os.urandom(8).hex()}"
        result = outcome(plan, sampling, self._room(ids))
        fault = plan.fault if plan.fault and plan.fault.kind else None
        probed = _probed(ids) if sampling.get("prompt_logprobs") is not None else None
        answer = GenerateAnswer(key, self.model, ids, result, asked, fault, probed)
        self._start(connection, Run(self, connection, key, plan, answer, bool(body.get("stream"))), ids)

    def _plan(self, path: str, turn: Turn) -> Plan:
        plan = self.script(turn)
        if self._faults[path]:
            return msgspec.structs.replace(plan, fault=self._faults[path].popleft())
        return plan

    def _refuses(self, connection: Connection, plan: Plan) -> bool:
        if plan.fault is None or plan.fault.kind != "status":
            return False
        connection.respond(plan.fault.status, self._failed(plan.fault.status))
        return True

    def _failed(self, status: int) -> bytes:
        kind = "InternalServerError" if status >= 500 else "BadRequestError"
        return self.encode({"error": {"message": "the script says so", "type": kind, "param": None, "code": status}})

    def _start(self, connection: Connection, run: Run, prompt: list[int]) -> None:
        self.running[run.key] = run
        self._prompts[run.key] = prompt
        connection.on_lost = run.left
        run.begin()

    def _prompt_of(self, body: Json) -> list[int]:
        text = self.template.render(
            body["messages"], body.get("tools"), generation=body.get("add_generation_prompt", True)
        )
        ids = encode(text)
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        check_sampling(body)
        check_length(len(ids), asked, self.max_model_len)
        return ids

    def _room(self, ids: list[int]) -> int:
        return max(self.max_model_len - len(ids), 1)

    def _body(self, request: Request) -> Json:
        if request.body and not request.headers.get(b"content-type", b"").startswith(b"application/json"):
            raise wrong_media_type()
        try:
            body = msgspec.json.decode(request.body) if request.body else {}
        except msgspec.DecodeError:
            body = None
        if self.record:
            self.received.append(Received(request.path, body))
        if not isinstance(body, dict):
            raise not_json()
        return body


def _usage(body: Json) -> dict[str, bool]:
    options = body.get("stream_options") or {}
    return {
        "usage": bool(options.get("include_usage")),
        "usage_each": bool(options.get("include_usage") and options.get("continuous_usage_stats")),
    }


def _probed(ids: list[int]) -> list[Any]:
    """``prompt_logprobs``: of every id but the first."""
    return [None, *({str(one): {"logprob": logprob(one), "rank": 1, "decoded_token": ""}} for one in ids[1:])]
