"""What a task fixes wins over what a program asks for; everything else stays as it was asked."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.fixed_sampling import fix
from schemas.tasks import EvaluatorSpec, SamplingSpec, TaskSpec

JSON = {"json": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "write"}}

options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.1, 1),
        "max_tokens": st.integers(1, 10_000) | st.none(),
        "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4) | st.none(),
        "response_format": st.just({"type": "json_object"}),
        "structured_outputs": st.just({"regex": "a*"}),
        "tool_choice": st.sampled_from(["auto", "none", "required", NAMED]),
        "top_k": st.integers(1, 50),
        "seed": st.integers(0, 9),
    },
)
samplings = st.builds(
    SamplingSpec,
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0.1, 1),
    max_tokens=st.none() | st.integers(1, 10_000),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=4),
    structured_outputs=st.none() | st.just(JSON),
)


@pytest.mark.parametrize(
    ("asked", "sampling", "effective"),
    [
        ({"temperature": 0.0}, SamplingSpec(), {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 0.9}, SamplingSpec(temperature=1.0), {"temperature": 1.0, "top_p": 0.9}),
        ({"top_p": 0.9}, SamplingSpec(top_p=1.0), {"top_p": 1.0}),
        ({}, SamplingSpec(max_tokens=9), {"max_tokens": 9}),
        ({"max_tokens": 5}, SamplingSpec(max_tokens=9), {"max_tokens": 5}),
        ({"max_tokens": 50}, SamplingSpec(max_tokens=9), {"max_tokens": 9}),
        ({"max_tokens": None}, SamplingSpec(max_tokens=9), {"max_tokens": 9}),
        ({"stop": "b"}, SamplingSpec(stop=["a"]), {"stop": ["a", "b"]}),
        ({"stop": ["a", "c"]}, SamplingSpec(stop=["b", "a"]), {"stop": ["b", "a", "c"]}),
        ({"stop": "b"}, SamplingSpec(stop=[]), {"stop": "b"}),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}, "tool_choice": NAMED},
            SamplingSpec(structured_outputs=JSON),
            {"structured_outputs": JSON, "tool_choice": "auto"},
        ),
        (
            {"tool_choice": "none"},
            SamplingSpec(structured_outputs=JSON),
            {"tool_choice": "none", "structured_outputs": JSON},
        ),
        ({"tool_choice": "required"}, SamplingSpec(), {"tool_choice": "required"}),
    ],
)
def test_the_task_is_laid_over_the_request(asked: dict[str, Any], sampling: SamplingSpec, effective: Any) -> None:
    assert fix(asked, sampling) == effective


@given(options, samplings)
def test_what_is_not_fixed_stays_and_fixing_twice_changes_nothing(
    asked: dict[str, Any], sampling: SamplingSpec
) -> None:
    before = copy.deepcopy(asked)
    fixed = fix(asked, sampling)
    assert asked == before, "the request's own options are not touched"
    assert fix(fixed, sampling) == fixed
    assert fix(asked, SamplingSpec()) == asked
    for name in ("top_k", "seed"):
        assert fixed.get(name) == asked.get(name)
    if sampling.max_tokens is not None:
        assert fixed["max_tokens"] <= sampling.max_tokens
        assert fixed["max_tokens"] <= (asked.get("max_tokens") or sampling.max_tokens)
    if sampling.structured_outputs is not None:
        assert "response_format" not in fixed and fixed["structured_outputs"] == JSON


def test_a_task_that_trains_samples_the_policys_own_distribution_unless_it_says_otherwise() -> None:
    task = TaskSpec(instruction="x", evaluator=EvaluatorSpec(command="true"))
    asked = {"temperature": 0.0, "top_p": 0.95, "top_k": 64, "min_p": 0.1, "seed": 1}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1}
    assert fix(asked, task.session_sampling) == plain
    assert fix(asked, msgspec.structs.replace(task, purpose="eval").session_sampling) == asked
    cooler = msgspec.structs.replace(task, sampling=SamplingSpec(temperature=0.5, top_k=10))
    assert fix(asked, cooler.session_sampling) == plain | {"temperature": 0.5, "top_k": 10}
