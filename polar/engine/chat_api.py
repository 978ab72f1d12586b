"""Plain Chat Completions with token ids and log-probs, for engines without the token endpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from polar.engine.chunks import Chunk
from polar.engine.client import SAMPLING, EngineClient, EngineFault, EngineRefused, EventStream, read_chunk

CHAT = "/v1/chat/completions"
IDS = {"return_token_ids": True, "logprobs": True}


async def whole(engine: EngineClient, request: dict[str, Any]) -> Chunk:
    """One whole answer. The choice has ``message`` in place of ``delta``."""
    return read_chunk(CHAT, await engine.post(CHAT, msgspec.json.encode(request | IDS), timeout=SAMPLING))


def stream(engine: EngineClient, request: dict[str, Any]) -> EventStream:
    """``prompt_token_ids`` come with the first chunk, the usage with the last."""
    body = request | IDS | {"stream": True, "stream_options": {"include_usage": True}}
    return engine.stream(CHAT, msgspec.json.encode(body))


async def count(engine: EngineClient, request: dict[str, Any]) -> int:
    """The tokens of a prompt."""
    asked = {name: request[name] for name in ("model", "messages", "tools", "chat_template_kwargs") if name in request}
    return msgspec.json.decode(await engine.post("/tokenize", msgspec.json.encode(asked)))["count"]


async def weight_version(engine: EngineClient) -> str:
    """The label of the weights in use. An engine that cannot be given new ones has the base model's: 0."""
    try:
        return str(await engine.weight_version())
    except EngineRefused as refused:
        if refused.status != 404:
            raise
        return "0"
    except (LookupError, TypeError) as error:
        raise EngineFault("/weight_info does not tell weight_version") from error
