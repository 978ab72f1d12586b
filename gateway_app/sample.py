"""What the engine sampled for one call: every id with its log-prob and weight version, or an error; never a guess."""

from __future__ import annotations

from typing import Any

from polar.engine.chunks import GenerateChunk
from schemas.packed import pack_ids, pack_logprobs
from schemas.sessions import CallCompleted, Sampling, VersionSpan

MISSING_LOGPROB = -9999.0
"""vLLM writes this where it has no log-prob for the sampled token."""

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
    """Grows with each chunk of the engine's stream; ``checked`` says whether it is whole and exact."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._engine_prompt: list[int] | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.usage: dict[str, Any] = {}
        self._spans: list[VersionSpan] = []

    def take(self, chunk: GenerateChunk) -> None:
        """Raises InexactSample where a chunk's log-probs are not those of its ids."""
        if chunk.prompt_token_ids is not None:
            self._engine_prompt = chunk.prompt_token_ids
        if chunk.usage is not None:
            self.usage = {name: count for name, count in chunk.usage.items() if count is not None}
        for choice in chunk.choices:
            ids = choice.token_ids or []
            entries = (choice.logprobs.content if choice.logprobs else None) or []
            if [entry.token_id for entry in entries] != ids:
                raise InexactSample(f"the engine sent {len(ids)} token ids with {len(entries)} log-probs of other ids")
            self.ids += ids
            self.logprobs += [entry.logprob for entry in entries]
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
            for span in choice.weight_versions or []:
                if not span.version.isdecimal():
                    raise InexactSample(f"the engine's weight version is {span.version!r}, not a number")
                self._spans.append(VersionSpan(int(span.version), span.start, span.end))

    @property
    def shown(self) -> int:
        """How many of the ids have text for the client: not the token that ended the response."""
        ended_by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return len(self.ids) - 1 if ended_by_token and self.ids else len(self.ids)

    def checked(
        self, session_id: str, attempt: int, call_id: str, message: dict[str, Any], finish_reason: str
    ) -> CallCompleted:
        """Raises InexactSample unless the engine ended the response and each token is fully known."""
        if self.finish_reason is None:
            raise InexactSample("the engine's stream ended without a finish reason")
        if self._engine_prompt is not None and self._engine_prompt != self._prompt_ids:
            raise InexactSample("the engine sampled from another prompt than it was given")
        count = self.usage.get("completion_tokens")
        if count != len(self.ids):
            raise InexactSample(f"the engine counts {count} tokens but sent {len(self.ids)} ids")
        if any(logprob <= MISSING_LOGPROB for logprob in self.logprobs):
            raise InexactSample("the engine has no log-prob for a sampled token")
        try:
            return CallCompleted(
                session_id=session_id,
                attempt=attempt,
                call_id=call_id,
                message=message,
                response_ids=pack_ids(self.ids),
                logprobs=pack_logprobs(self.logprobs),
                finish_reason=finish_reason,
                stop_reason=self.stop_reason,
                weight_versions=self._spans,
                usage=self.usage,
            )
        except ValueError as error:
            raise InexactSample(str(error)) from error


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
