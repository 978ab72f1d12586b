"""A sample is exact, or an error: every id with its log-prob, and the counts of the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway_app.sampling.sample import InexactSample, Sample
from polar.engine.chunks import Chunk

CHOICE: dict[str, Any] = {
    "token_ids": [7, 8],
    "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.0}]},
    "finish_reason": "stop",
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def sampled(choice: dict[str, Any], usage: dict[str, Any] | None = None, prompt: list[int] | None = None) -> Sample:
    sample = Sample(prompt)
    sample.take(msgspec.convert({"choices": [CHOICE | choice], "usage": USAGE | (usage or {})}, Chunk))
    return sample


def test_a_whole_sample_passes() -> None:
    sample = sampled({}, prompt=[1, 2, 3])
    sample.check()
    assert (sample.ids, sample.shown) == ([7, 8], 1)


@pytest.mark.parametrize(
    ("choice", "usage", "said"),
    [
        ({"finish_reason": None}, {}, "without a finish reason"),
        ({}, {"completion_tokens": 3}, "counts 3 tokens"),
        ({}, {"prompt_tokens": 4}, "counts 4 prompt tokens of 3"),
        ({"logprobs": {"content": [{"logprob": -9999.0}, {"logprob": -1.0}]}}, {}, "no log-prob"),
    ],
)
def test_what_is_not_whole_is_an_error(choice: dict[str, Any], usage: dict[str, Any], said: str) -> None:
    with pytest.raises(InexactSample, match=said):
        sampled(choice, usage, [1, 2, 3]).check()


def test_without_the_prompts_ids_there_is_no_sample() -> None:
    with pytest.raises(InexactSample, match="return_token_ids"):
        sampled({}).check()


@pytest.mark.parametrize("logprobs", [None, {"content": []}, {"content": [{"token_id": 9, "logprob": -1.0}] * 2}])
def test_log_probs_of_other_ids_are_an_error(logprobs: Any) -> None:
    with pytest.raises(InexactSample, match="log-probs of other ids"):
        sampled({"logprobs": logprobs})
