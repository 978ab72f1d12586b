"""The connection to vLLM and its weight control. Every request but a stream of tokens has a deadline.

What is sampled through it: ``token_api`` (ids in, ids out) and ``chat_api`` (plain Chat Completions).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.engine.chunks import Choice, Chunk, decode_chunk, event_blocks

CONTROL = aiohttp.ClientTimeout(total=60, sock_connect=5)
WEIGHTS = aiohttp.ClientTimeout(total=300, sock_connect=5)
QUICK = aiohttp.ClientTimeout(total=5, sock_connect=2)
SAMPLING = aiohttp.ClientTimeout(total=None, sock_connect=5)
"""How long it may take is the caller's business: a request may wait in the engine's queue for its first token."""
KEEP_ALIVE_S = 3.0
"""Less than the engine's own: a connection that it closes just when it is used again would fail a call."""
JSON = {"content-type": "application/json"}
RUSH_S, TRICKLE_S, GATHER_S = 0.001, 0.004, 0.04
"""Tokens that trickle, one in RUSH_S to TRICKLE_S, are read for GATHER_S together: waking up costs more than one."""


class EngineError(Exception):
    """The boundary to the engine; the message says what was asked and what came back."""


class EngineUnavailable(EngineError):
    """No connection, or no answer in time."""


class EngineRefused(EngineError):
    """The request is at fault (4xx). ``status`` and ``error`` are the engine's, in OpenAI's shape."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", "refused")))
        self.status = status
        self.error = error


class EngineFault(EngineError):
    """The engine failed (5xx, or an answer that cannot be read)."""


class EngineClient:
    """One engine at ``url``; an async context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        # The engine serves as many requests at once as it is sent; its own queue is the limit.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def healthy(self) -> bool:
        """Whether it answers and its core is alive."""
        try:
            await self._request("GET", "/health", timeout=QUICK)
        except EngineError:
            return False
        return True

    async def wait_healthy(self, deadline_s: float) -> None:
        """Returns once it is healthy. Raises EngineUnavailable after ``deadline_s``."""
        try:
            async with asyncio.timeout(deadline_s):
                while not await self.healthy():  # noqa: ASYNC110 - the engine can only be asked
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}: the engine was not up within {deadline_s:.0f} s") from None

    async def models(self) -> dict[str, Any]:
        """The body of ``/v1/models``."""
        return await self._request("GET", "/v1/models", timeout=QUICK)

    async def post(self, path: str, body: bytes, timeout: aiohttp.ClientTimeout = CONTROL) -> bytes:
        """The bytes of a JSON answer to a JSON body."""
        return await self._exchange("POST", path, body, timeout)

    def stream(self, path: str, body: bytes) -> EventStream:
        return EventStream(self._session, self.url, path, body)

    async def probe_logprobs(self, prompt_ids: list[int]) -> NDArray[np.float32]:
        """Log-probs (nats, temperature 1) of ``prompt_ids`` (n tokens) after the first: float32, shape (n−1,)."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"token_ids": prompt_ids, "sampling_params": sampling, "stream": False}
        answer = await self._request("POST", "/inference/v1/generate", body)
        entries = answer.get("prompt_logprobs") or []
        if len(entries) != len(prompt_ids):
            raise EngineFault(f"{self.url}: {len(entries)} prompt log-probs for {len(prompt_ids)} tokens")
        pairs = zip(prompt_ids[1:], entries[1:], strict=True)
        return np.array([entry[str(token)]["logprob"] for token, entry in pairs], dtype=np.float32)

    async def weight_version(self) -> str:
        """The label of the weights in use; ``default`` on an engine that was never told one."""
        return (await self._request("GET", "/weight_info", timeout=QUICK))["weight_version"]

    async def set_weight_version(self, version: int) -> None:
        await self._request("POST", "/update_weight_version", {"new_version": str(version)})

    async def paused(self) -> bool:
        return (await self._request("GET", "/is_paused", timeout=QUICK))["is_paused"]

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def load_weights(self, path: str, version: int) -> None:
        """Loads ``path``/*.safetensors as ``version`` while requests in flight are held, and lets them go on.

        The caller has checked the files: a bad folder kills the engine. Resumes also when a step fails; the label is
        then no number, so that nothing sampled from half-loaded weights is taken for a version.
        """
        await self._request("POST", "/init_weight_transfer_engine", {"init_info": {}})
        await self._request("POST", "/pause?mode=keep")
        try:
            await self._request("POST", "/update_weight_version", {"new_version": f"loading {version}"})
            await self._request("POST", "/collective_rpc", {"method": "abandon_weight_update"}, timeout=WEIGHTS)
            await self._request("POST", "/start_weight_update", timeout=WEIGHTS)
            await self._request("POST", "/update_weights", {"update_info": {"path": path}}, timeout=WEIGHTS)
            await self._request("POST", "/finish_weight_update", {"weight_version": str(version)}, timeout=WEIGHTS)
            await self._request("POST", "/reset_prefix_cache")
        finally:
            await self.resume()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("use EngineClient as an async context manager")
        return self._http

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: aiohttp.ClientTimeout = CONTROL
    ) -> Any:
        content = await self._exchange(method, path, None if body is None else msgspec.json.encode(body), timeout)
        return msgspec.json.decode(content) if content else None

    async def _exchange(self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout) -> bytes:
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=JSON, timeout=timeout
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _error(path, response.status, content)
        return content


class EventStream:
    """A stream of server-sent events: ``open``, then iterate; each step has the data of those that arrived together.

    An async context manager; leaving it, or ``close`` from elsewhere, ends the request in the engine.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, path: str, body: bytes) -> None:
        self._http, self._url, self._body = http, url + path, body
        self.path = path
        self._response: aiohttp.ClientResponse | None = None
        self._closed = False

    async def __aenter__(self) -> EventStream:
        """Returns when the engine has accepted the request. Raises EngineError."""
        try:
            response = await self._http.post(self._url, data=self._body, headers=JSON, timeout=SAMPLING)
            self._response = response
            if response.status != 200:
                raise _error(self.path, response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{self._url}: {error or type(error).__name__}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _gather(self) -> None:
        """Leaves what comes in the socket for a moment: waking up costs more than a token."""
        transport = self._response.connection.transport if self._response and self._response.connection else None
        if transport is None or transport.is_closing():
            return
        transport.pause_reading()
        try:
            await asyncio.sleep(GATHER_S)
        finally:
            transport.resume_reading()

    def close(self) -> None:
        if self._response is not None and not self._closed:
            self._closed = True
            self._response.close()

    async def __aiter__(self) -> AsyncGenerator[list[Chunk], None]:
        assert self._response is not None, "a stream is iterated inside `async with`"
        last, quick = 0.0, 0
        try:
            async for events in event_blocks(self._response.content.iter_any()):
                now = time.monotonic()
                quick = quick + 1 if RUSH_S < (now - last) / len(events) < TRICKLE_S else 0
                last = now
                yield [read_chunk(self.path, data) for data in events]
                if quick > 1:
                    await self._gather()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{self._url}: {error or type(error).__name__}") from error
        self._closed = True
        self._response.release()


def read_chunk(path: str, data: bytes) -> Chunk:
    """Raises EngineFault for what is no chunk, and for the error that the engine sends in place of one."""
    try:
        chunk = decode_chunk(data)
    except msgspec.MsgspecError as error:
        raise EngineFault(f"{path}: an answer that cannot be read ({error})") from error
    if chunk.error is not None:
        raise EngineFault(f"{path}: {chunk.error.get('message', chunk.error)}")
    return chunk


def only_choice(path: str, chunk: Chunk) -> Choice:
    """Raises EngineFault for an answer without a choice."""
    if not chunk.choices:
        raise EngineFault(f"{path}: an answer without a choice")
    return chunk.choices[0]


def _error(path: str, status: int, content: bytes) -> EngineError:
    try:
        error = msgspec.json.decode(content)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        error = {"message": content[:300].decode(errors="replace")}
    if 400 <= status < 500:
        return EngineRefused(status, error if isinstance(error, dict) else {"message": str(error)})
    return EngineFault(f"{path}: status {status}: {error}")
