"""Requests of each dialect to a gateway over HTTP, as a program sends them, and what is read from the answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from gateway_stand import SECRET, Stand
from provider_clients import CLIENTS, Client, meaning

from polar.session_token import sign
from schemas.tasks import Budget, SamplingSpec

PATHS = {
    "openai.chat": "v1/chat/completions",
    "anthropic.messages": "v1/messages",
    "openai.responses": "v1/responses",
    "google.generate": "v1beta/models/m:generateContent",
}
LIMITS = {"anthropic.messages": "max_tokens", "openai.responses": "max_output_tokens", "openai.chat": "max_tokens"}
EVENTS = "text/event-stream"


class Got(msgspec.Struct, frozen=True):
    """An answer of ``client``'s dialect. ``blocks`` are the pieces in which it came."""

    client: Client
    status: int
    headers: dict[str, str]
    content: bytes
    blocks: list[bytes] = []

    @property
    def streamed(self) -> bool:
        return self.headers["Content-Type"].startswith(EVENTS)

    @property
    def turn(self) -> Any:
        """What the program puts into its history; None for a stream without its end."""
        if self.streamed:
            return self.client.of_stream(self.content)
        return self.client.of_whole(json.loads(self.content)) if self.status == 200 else None

    def message(self) -> dict[str, Any]:
        """The turn as an assistant message of chat shape."""
        body = msgspec.json.encode(request(self.client, turns=[self.turn]))
        (found,) = [message for message in self.client.parse(body).messages if message["role"] == "assistant"]
        return found

    def text(self) -> str:
        return meaning(self.message())[0]

    def error(self) -> dict[str, Any]:
        """The error in the dialect's own place, of a refusal or inside a stream."""
        if not self.streamed:
            return json.loads(self.content)["error"]
        name = self.client.dialect.name
        if name == "google.generate":
            return json.loads(self.content[self.content.rindex(b'{"error"') :])["error"]
        last = json.loads(self.content.decode().rstrip().rpartition("data: ")[2])
        if name == "openai.responses":
            assert last["type"] in ("response.failed", "error")
            return last["response"]["error"] if "response" in last else last
        return last["error"]


def request(client: Client, *, turns: list[Any] | None = None, streamed: bool = False, **changes: Any) -> Any:
    """A body whose limit is no limit."""
    name = client.dialect.name
    body = client.request(turns or [])
    body.pop("stream", None)
    if name in LIMITS:
        body |= {"stream": streamed, LIMITS[name]: 30_000}
    return body | changes


def root(gateway: Stand, session: str, *, sampling: SamplingSpec | None = None, budget: Budget | None = None) -> str:
    """The base URL of a session whose token says ``sampling`` and ``budget``."""
    token = sign(SECRET, session, 0, 600, sampling=sampling or SamplingSpec(), budget=budget or Budget())
    return f"{gateway.url}/s/{token}"


def url(base: str, dialect: str, *, streamed: bool) -> str:
    if dialect == "google.generate" and streamed:
        return f"{base}/v1beta/models/m:streamGenerateContent?alt=sse"
    return f"{base}/{PATHS[dialect]}"


async def ask(
    gateway: Stand,
    base: str,
    dialect: str,
    *,
    streamed: bool = False,
    body: Any = None,
    headers: dict[str, str] | None = None,
    **changes: Any,
) -> Got:
    """``body`` in place of the dialect's usual one, with ``changes``."""
    client = CLIENTS[dialect]
    sent = request(client, streamed=streamed, **changes) if body is None else body
    async with gateway.http.post(url(base, dialect, streamed=streamed), json=sent, headers=headers) as response:
        blocks = [block async for block in response.content.iter_any()]
        return Got(client, response.status, dict(response.headers), b"".join(blocks), blocks)
