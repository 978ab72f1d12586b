"""What the engine sampled for one call: every id with its log-prob and weight version, or an error; never a guess."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from polar.engine.chunks import MISSING_LOGPROB, Chunk
from schemas.sessions import Sampling, VersionSpan

NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "min_tokens": 0,
    "structured_outputs": None,
}
"""Parameters that change the distribution beyond temperature, with the value that changes nothing."""


class InexactSample(ValueError):
    """Ids, log-probs or weight versions are missing or do not fit each other. Such a call is no training data."""


class Sample:
    """Grows with each chunk of the engine's answer; ``check`` says whether it is whole and exact."""

    def __init__(self, prompt_ids: list[int] | None = None) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.first_at: float | None = None
        """When the first id came, on the monotonic clock."""
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.spans: list[VersionSpan] = []
        self.cached = 0
        self._counted: int | None = None
        self._prompt_counted: int | None = None

    def take(self, chunk: Chunk) -> None:
        """Raises InexactSample where a chunk's log-probs are not those of its ids."""
        if chunk.prompt_token_ids is not None:
            self.prompt_ids = chunk.prompt_token_ids
        if chunk.usage is not None:
            self._counted, self._prompt_counted = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            self.cached = (details.cached_tokens or 0) if details else 0
        for choice in chunk.choices:
            ids = choice.token_ids or []
            entries = (choice.logprobs.content if choice.logprobs else None) or []
            if len(entries) != len(ids) or any(
                entry.token_id is not None and entry.token_id != token
                for entry, token in zip(entries, ids, strict=True)
            ):
                raise InexactSample(f"the engine sent {len(ids)} token ids with {len(entries)} log-probs of other ids")
            if self.first_at is None and ids:
                self.first_at = time.monotonic()
            self.ids += ids
            self.logprobs += [entry.logprob for entry in entries]
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
            for span in choice.weight_versions or []:
                self.spans.append(VersionSpan(version_number(span.version), span.start, span.end))

    @property
    def ended_by_token(self) -> bool:
        return self.finish_reason in ("stop", "tool_calls") and not isinstance(self.stop_reason, str)

    @property
    def shown(self) -> int:
        """How many of the ids have text for the client: not the token that ended the response."""
        return len(self.ids) - 1 if self.ended_by_token and self.ids else len(self.ids)

    def check(self) -> None:
        """Raises InexactSample unless the engine ended the response and each token is fully known."""
        if self.finish_reason is None:
            raise InexactSample("the engine's stream ended without a finish reason")
        if self.prompt_ids is None:
            raise InexactSample("the engine did not tell the prompt's token ids: it must answer return_token_ids")
        if self.finish_reason != "abort" and self._counted != len(self.ids):
            raise InexactSample(f"the engine counts {self._counted} tokens but sent {len(self.ids)} ids")
        if self._prompt_counted is not None and self._prompt_counted != len(self.prompt_ids):
            raise InexactSample(f"the engine counts {self._prompt_counted} prompt tokens of {len(self.prompt_ids)}")
        if any(logprob <= MISSING_LOGPROB for logprob in self.logprobs):
            raise InexactSample("the engine has no log-prob for a sampled token")


def version_number(label: str) -> int:
    """Raises InexactSample for a label that no weight version has."""
    if not label.isdecimal():
        raise InexactSample(f"the engine's weight version is {label!r}, not a number")
    return int(label)


def effective_sampling(parameters: dict[str, Any]) -> Sampling:
    """From the ``sampling_params`` that the engine's render resolved; what it leaves out has vLLM's own default."""
    return Sampling(
        temperature=parameters.get("temperature", 1.0),
        top_p=parameters.get("top_p", 1.0),
        top_k=max(parameters.get("top_k", 0), 0),
        min_p=parameters.get("min_p", 0.0),
        max_tokens=parameters.get("max_tokens"),
        stop=parameters.get("stop") or [],
        seed=parameters.get("seed"),
        altered=[name for name, neutral in NEUTRAL.items() if parameters.get(name, neutral) not in (neutral, None, {})],
    )


CONSTRAINING = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def asked_sampling(options: dict[str, Any]) -> Sampling:
    """From a chat request, for an engine that does not say what it resolved; it must have vLLM's own defaults."""
    sampling = effective_sampling(options)
    choice = options.get("tool_choice")
    altered = [name for name in CONSTRAINING if options.get(name) not in (None, {"type": "text"})]
    altered += ["tool_choice"] if choice not in (None, "auto", "none") else []
    return msgspec.structs.replace(sampling, altered=[*sampling.altered, *altered])
