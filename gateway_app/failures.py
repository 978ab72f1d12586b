"""Why a call gave no response: one type for all boundaries, and the one place that classifies their errors."""

from __future__ import annotations

import re

from gateway_app.sampling.sample import InexactSample
from polar.engine.client import EngineRefused, EngineUnavailable
from streams.errors import KafkaUnavailable, StreamError

RETRY_AFTER_S = 2

OVERFLOW = re.compile(r"maximum (context|model) length|context length \(|longer than the maximum|prompt is too long")
"""What vLLM says of a prompt that does not fit, alone or with the tokens that it is asked for."""


class Failure(Exception):
    """As the record and as the client see it. ``infrastructure`` faults are not the agent's."""

    def __init__(self, reason: str, detail: str, status: int, *, infrastructure: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.status = status
        self.infrastructure = infrastructure

    @property
    def headers(self) -> dict[str, str]:
        """Agent programs wait and try again at 503 and 429, so Retry-After says when."""
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def session_ended() -> Failure:
    """For a client that is still there when its attempt has ended."""
    return Failure("session_ended", "this session has ended", 403)


def context_overflow(prompt_tokens: int, max_model_len: int) -> Failure:
    return Failure("context_overflow", f"prompt is too long: {prompt_tokens} tokens > {max_model_len} maximum", 400)


def classify(error: Exception) -> Failure:
    """What each boundary's error means. A fault of infrastructure is 503: programs ask again."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, EngineRefused):
        if OVERFLOW.search(str(error)):
            return Failure("context_overflow", str(error), 400)
        return Failure("request_refused", str(error), error.status)
    if isinstance(error, KafkaUnavailable):
        return Failure("kafka_unavailable", "the call cannot be recorded at the moment", 503, infrastructure=True)
    names = {EngineUnavailable: "engine_unavailable", StreamError: "record_refused", InexactSample: "inexact_sample"}
    reason = next((name for kind, name in names.items() if isinstance(error, kind)), "engine_fault")
    return Failure(reason, str(error), 503, infrastructure=True)
