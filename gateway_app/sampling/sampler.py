"""Makes the sampling of each call, by the engine's API that the settings name; and answers about the engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway_app.call import Call
from gateway_app.dialects.dialect import ModelRequest
from gateway_app.sampling.chat import ChatSampling, WeightLabel
from gateway_app.sampling.exact import ExactSampling
from gateway_app.sampling.prompts import UNRENDERED, Prompts
from gateway_app.sampling.sampling import Sampling
from polar.engine import chat_api, token_api
from polar.engine.client import EngineClient


class Sampler:
    """``hold_s``: how long a call waits for an engine that is away."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        policy: str,
        api: Literal["tokens", "chat"],
        history: Literal["exact", "template"],
        hold_s: float,
    ) -> None:
        self.engine = engine
        self._policy = policy
        self._api = api
        self._hold_s = hold_s
        self._prompts = Prompts(engine, exact=history == "exact")
        self._label = WeightLabel(engine)

    def chat_request(self, request: ModelRequest) -> dict[str, Any]:
        """What the engine is asked. Whatever name the agent program uses, there is one policy."""
        chat = request.options | {"model": self._policy, "messages": request.messages}
        return chat | {"tools": request.tools} if request.tools else chat

    def sampling(self, call: Call) -> Sampling:
        if self._api == "chat":
            return ChatSampling(self.engine, self._label, call, self._hold_s)
        return ExactSampling(self.engine, self._prompts, call, self._hold_s)

    async def count(self, request: ModelRequest) -> int:
        """The tokens of a prompt. Raises EngineError."""
        chat = self.chat_request(request)
        if self._api == "chat":
            return await chat_api.count(self.engine, chat)
        asked = {name: value for name, value in chat.items() if name not in UNRENDERED}
        return len((await token_api.render(self.engine, asked)).token_ids)

    async def models(self, dialect: str, name: str | None) -> bytes:
        """The list of models, or the one asked for: whatever its name, it is the policy. Raises EngineError."""
        listed = await self.engine.models()
        if dialect == "google.generate":
            limit = listed["data"][0].get("max_model_len")
            methods = ["generateContent", "countTokens"]
            model = {"name": f"models/{name or self._policy}", "supportedGenerationMethods": methods}
            model |= {"inputTokenLimit": limit, "outputTokenLimit": limit}
            return msgspec.json.encode(model if name else {"models": [model]})
        return msgspec.json.encode(listed["data"][0] | {"id": name} if name else listed)
