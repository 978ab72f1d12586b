"""A proxy before the real engine that records what it streams, and spoils it where a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

Spoil = Callable[[dict[str, Any]], dict[str, Any] | None]
Rerender = Callable[[dict[str, Any]], dict[str, Any]]


class EngineProxy:
    """``streams``: the chunks of each generate call, as the engine sent them. ``spoil`` alters one, or cuts (None).

    ``rerender`` alters what the engine rendered, ``regenerate`` what it is asked to sample.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.streams: list[list[dict[str, Any]]] = []
        self.prompts: list[list[int]] = []
        self.spoil: Spoil = lambda chunk: chunk
        self.rerender: Rerender = lambda rendered: rendered
        self.regenerate: Rerender = lambda body: body
        self.url = ""

    def prompt(self, index: int = -1) -> list[int]:
        """What the engine was given to sample from."""
        return self.prompts[index]

    def sampled(self, index: int = -1) -> tuple[list[int], list[float], list[dict[str, Any]]]:
        """Ids, log-probs and weight versions of one recorded stream."""
        choices = [choice for chunk in self.streams[index] for choice in chunk["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        logprobs = [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]
        return ids, logprobs, choices[-1]["weight_versions"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        content, prompt = await request.read(), list[int]()
        if request.path.endswith("/generate"):
            body = self.regenerate(json.loads(content))
            prompt, content = body["token_ids"], json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self._http.request(
            request.method, self._target + request.path_qs, data=content, headers=headers
        ) as answer:
            if not request.path.endswith("/generate") or answer.status != 200:
                body = await answer.read()
                if request.path.endswith("/render") and answer.status == 200:
                    body = json.dumps(self.rerender(json.loads(body))).encode()
                return web.Response(body=body, status=answer.status, content_type=answer.content_type)
            return await self._stream(request, answer, prompt)

    async def _stream(self, request: web.Request, answer: Any, prompt: list[int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        recorded: list[dict[str, Any]] = []
        self.streams.append(recorded)
        self.prompts.append(prompt)
        async for line in answer.content:
            if line.startswith(b"data: {"):
                recorded.append(json.loads(line[6:]))
                spoilt = self.spoil(json.loads(line[6:]))
                if spoilt is None:
                    request.transport.close()
                    return response
                await response.write(b"data: " + json.dumps(spoilt).encode() + b"\n")
            else:
                await response.write(line)
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineProxy]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        async with ClientSession(timeout=ClientTimeout(total=300), read_bufsize=1 << 22) as self._http:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await asyncio.wait_for(runner.cleanup(), 20)
