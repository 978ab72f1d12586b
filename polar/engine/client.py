"""The client of vLLM's token-in, token-out endpoints and of its weight control. Every request has a deadline.

A chat request becomes ids by ``render``, the ids are sampled from by ``generate``, and sampled ids become text and tool
calls by ``derender`` or, piece by piece, ``derender_delta``. No tokenizer and no tool parser lives on our side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.engine.chunks import GenerateChunk, decode_chunk, server_sent_events

CONTROL = aiohttp.ClientTimeout(total=60, sock_connect=5)
WEIGHTS = aiohttp.ClientTimeout(total=300, sock_connect=5)
QUICK = aiohttp.ClientTimeout(total=5, sock_connect=2)
GENERATE = aiohttp.ClientTimeout(total=3600, sock_connect=5, sock_read=600)
"""Between two tokens; a request may wait in the engine's queue for its first."""


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
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
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

    async def render(self, chat_request: dict[str, Any]) -> dict[str, Any]:
        """A chat request to the body of ``generate``: ``token_ids``, ``sampling_params`` and more.

        Raises EngineRefused for a request that the engine does not accept (also: too long for the context).
        """
        return await self._request("POST", "/v1/chat/completions/render", chat_request)

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[GenerateChunk]:
        """Samples, and yields chunks as they come. The last with a choice has ``finish_reason`` and the version spans.

        Closing the iterator ends the request in the engine.
        """
        body = body | {
            "sampling_params": body["sampling_params"]
            | {"logprobs": max(body["sampling_params"].get("logprobs") or 0, 0)},
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(self.url + "/inference/v1/generate", json=body, timeout=GENERATE) as response:
                if response.status != 200:
                    raise _error("/inference/v1/generate", response.status, await response.read())
                async for data in server_sent_events(response.content.iter_any()):
                    yield _chunk(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{self.url}/inference/v1/generate: {error or type(error).__name__}") from error

    async def abort(self, request_id: str) -> None:
        """Ends a request that ``generate`` was given as ``request_id``; its stream ends with the reason ``abort``."""
        ids = [f"generate-tokens-{request_id}"]
        await self._request("POST", "/inference/v1/abort_requests", {"request_ids": ids}, timeout=QUICK)

    async def derender(
        self, chat_request: dict[str, Any], prompt_ids: list[int], choice: dict[str, Any]
    ) -> dict[str, Any]:
        """A whole response (``token_ids``, ``finish_reason`` …) to a chat completion."""
        body = {
            "chat_request": _unstreamed(chat_request),
            "generate_response": {"request_id": "whole", "choices": [{"index": 0, **choice}]},
            "prompt_tokens": len(prompt_ids),
            "prompt_token_ids": prompt_ids,
        }
        return await self._request("POST", "/v1/chat/completions/derender", body)

    async def derender_delta(
        self,
        chat_request: dict[str, Any],
        prompt_ids: list[int],
        choice: dict[str, Any],
        state: dict[str, Any] | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next tokens of a response to (a streamed chunk's choice, the state for the next call)."""
        body = {
            "stream": True,
            "chat_request": _unstreamed(chat_request),
            "generate_chunk": {"request_id": "delta", "choices": [{"index": 0, **choice}]},
            "stream_state": state,
            "prompt_token_ids": prompt_ids,
        }
        answer = await self._request("POST", "/v1/chat/completions/derender", body)
        return answer["chunk"]["choices"][0], answer["stream_state"]

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
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _error(path, response.status, content)
        return msgspec.json.decode(content) if content else None


def _unstreamed(chat_request: dict[str, Any]) -> dict[str, Any]:
    """Without what is for the engine's own streaming: it refuses ``stream_options`` where ``stream`` is not set."""
    return {name: value for name, value in chat_request.items() if name not in ("stream", "stream_options")}


def _chunk(data: bytes) -> GenerateChunk:
    try:
        chunk = decode_chunk(data)
    except msgspec.MsgspecError as error:
        raise EngineFault(f"/inference/v1/generate: a chunk that cannot be read ({error})") from error
    if chunk.error is not None:
        raise EngineFault(f"/inference/v1/generate: {chunk.error.get('message', chunk.error)}")
    return chunk


def _error(path: str, status: int, content: bytes) -> EngineError:
    try:
        error = msgspec.json.decode(content)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        error = {"message": content[:300].decode(errors="replace")}
    if 400 <= status < 500:
        return EngineRefused(status, error if isinstance(error, dict) else {"message": str(error)})
    return EngineFault(f"{path}: status {status}: {error}")
