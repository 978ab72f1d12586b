"""The scripted engine is asked what real vLLM is asked, and must answer alike: status, shapes, order, errors.

Ids and log-probs are each engine's own. Real vLLM is made to say a given text by a structured output.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from both_engines import (
    ASKED,
    CALL,
    CHAT,
    CONTEXT,
    GENERATE,
    PICTURE,
    RENDER,
    TOOL,
    Answer,
    Both,
    alike,
    side_by_side,
    without_ids,
)
from engine_fixture import RunningEngine
from scripted_engine import Plan, always
from scripted_engine.tokens import VOCABULARY

pytestmark = pytest.mark.engine


@pytest.fixture
async def both(engine: RunningEngine) -> AsyncIterator[Both]:
    async with side_by_side(engine.url) as together:
        yield together


# Status endpoints


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/weight_info", "/is_paused", "/version", "/nothing", CHAT])
async def test_get(both: Both, path: str) -> None:
    alike(*await both.ask(path, method="GET"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/resume", None),
        ("/reset_prefix_cache", None),
        ("/update_weight_version", {"new_version": "0"}),
        ("/inference/v1/abort_requests", {"request_ids": ["nobody"]}),
        ("/collective_rpc", {"method": "abandon_weight_update"}),
        ("/v1/nothing", {}),
    ],
)
async def test_control(both: Both, path: str, body: Any) -> None:
    alike(*await both.ask(path, body))


# Chat completions

SAYINGS = {
    "text": ("abcdef", {}),
    "one call": (CALL, {"tools": [TOOL]}),
    "text and call": (f"look {CALL}", {"tools": [TOOL]}),
    "text with tools": ("abcdef", {"tools": [TOOL]}),
    "tools not to be used": ("abcdef", {"tools": [TOOL], "tool_choice": "none"}),
    "characters of many bytes": ("é€ x", {}),
    "stop string": ("abcdef", {"stop": ["cd"]}),
    "stop string with tools": ("abcdef", {"stop": "cd", "tools": [TOOL]}),
}
WANTED = {
    "plain": {},
    "log-probs": {"logprobs": True},
    "ids": {"return_token_ids": True},
    "both": {"logprobs": True, "return_token_ids": True},
    "best two": {"logprobs": True, "top_logprobs": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "usage each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@pytest.mark.parametrize(
    ("saying", "wanted"),
    [*itertools.product(("text", "one call"), WANTED), *itertools.product(SAYINGS, ("plain", "both", "usage"))],
)
async def test_streamed_chat(both: Both, saying: str, wanted: str) -> None:
    text, changes = SAYINGS[saying]
    both.script.script = always(Plan(content=text))
    asked = ASKED | changes | WANTED[wanted] | {"stream": True, "structured_outputs": {"choice": [text]}}
    real, fake = await both.ask(CHAT, asked)
    alike(real, fake)
    assert said(fake) == said(real)


@pytest.mark.parametrize("wanted", ["plain", "both", "best two"])
@pytest.mark.parametrize("saying", SAYINGS)
async def test_whole_chat(both: Both, saying: str, wanted: str) -> None:
    text, changes = SAYINGS[saying]
    both.script.script = always(Plan(content=text))
    real, fake = await both.ask(CHAT, ASKED | changes | WANTED[wanted] | {"structured_outputs": {"choice": [text]}})
    alike(real, fake)
    first, second = (one.body["choices"][0] for one in (real, fake))
    assert (second["finish_reason"], second["stop_reason"]) == (first["finish_reason"], first["stop_reason"])
    assert without_ids(second["message"]) == without_ids(first["message"])


def said(answer: Answer) -> dict[str, Any]:
    """What a stream tells: its text, and each call's name and arguments."""
    content, calls = "", dict[int, list[str]]()
    for event in answer.events:
        for choice in event["choices"] if isinstance(event, dict) else []:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                name, arguments = calls.setdefault(call["index"], ["", ""])
                function = call["function"]
                calls[call["index"]] = [
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                ]
    return {"content": content, "calls": calls}


@pytest.mark.parametrize("streamed", [False, True])
async def test_too_few_tokens(both: Both, streamed: bool) -> None:
    both.script.script = always(Plan(content="abcdef"))
    asked = ASKED | {"max_tokens": 1, "stream": streamed, "return_token_ids": True, "logprobs": True}
    real, fake = await both.ask(CHAT, asked | {"structured_outputs": {"choice": ["abcdef"]}})
    alike(real, fake)


# Token in, token out

RENDERED = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "no tools to be used": {"tools": [TOOL], "tool_choice": "none"},
    "a tool required": {"tools": [TOOL], "tool_choice": "required"},
    "a tool named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "write_file"}}},
    "sampling": {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["x"], "max_tokens": 4, "presence_penalty": 1},
    "more sampling": {"ignore_eos": True, "min_tokens": 2, "logit_bias": {"5": 1}, "stop_token_ids": [7], "seed": None},
    "log-probs": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "json": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    "choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
    "more than there is room for": {"max_completion_tokens": CONTEXT - 1},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "history": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "write_file", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "done"},
            {"role": "system", "content": "go on"},
        ],
    },
    "unknown fields": {"store": False, "foo": 1},
    "no generation prompt": {"add_generation_prompt": False},
}


@pytest.mark.parametrize("case", RENDERED)
async def test_render(both: Both, case: str) -> None:
    real, fake = await both.ask(RENDER, ASKED | RENDERED[case])
    alike(real, fake)
    room = [one.body["sampling_params"].pop("max_tokens") + len(one.body["token_ids"]) for one in (real, fake)]
    if "max_tokens" not in RENDERED[case]:
        assert room == [CONTEXT, CONTEXT]
    for one in (real, fake):  # the grammar of a forced call is the parser's own
        (one.body["sampling_params"].get("structured_outputs") or {}).pop("structural_tag", None)
    assert fake.body["sampling_params"] == real.body["sampling_params"]


@pytest.mark.parametrize("top", [None, 0, 2])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "limits"),
    [("abcdef", {}), ("abcdefghijkl", {"max_tokens": 3}), ("abcdefghijkl", {"stop": ["ij"]}), (CALL, {})],
)
async def test_generate(both: Both, text: str, limits: dict[str, Any], streamed: bool, top: int | None) -> None:
    both.script.script = always(Plan(content=text))
    answers = []
    for asking in (both.real, both.fake):
        body = await asking.render(structured_outputs={"choice": [text]})
        body["sampling_params"] |= limits | ({"logprobs": top} if top is not None else {})
        body |= {"stream": streamed, "return_token_ids": top == 0}
        if streamed:
            body["stream_options"] = {"include_usage": top != 2}
        answers.append(await asking.ask(GENERATE, body))
        counted(answers[-1], streamed, body["stream_options"] or {})
    alike(*answers)


def counted(answer: Answer, streamed: bool, options: dict[str, Any]) -> None:
    """The versions cover all ids, and the usage counts them."""
    choices = [one for event in answer.events[:-1] for one in event["choices"]] if streamed else answer.body["choices"]
    count = sum(len(choice["token_ids"]) for choice in choices)
    assert [(span["start"], span["end"]) for span in choices[-1]["weight_versions"]] == [(0, count)]
    if not streamed or options["include_usage"]:
        usage = answer.events[-2]["usage"] if streamed else answer.body["usage"]
        assert usage["completion_tokens"] == count


async def test_prompt_log_probs(both: Both) -> None:
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": False}
    real, fake = await both.ask(GENERATE, body)
    alike(real, fake)
    assert [list(one or ()) for one in fake.body["prompt_logprobs"]] == [[], ["6"], ["7"]]


# Refusals: the very words

REFUSED: dict[str, dict[str, Any]] = {
    "prompt over the context": {"messages": [{"role": "user", "content": "hello world " * 8000}]},
    "more output than context": {"max_tokens": 100_000},
    "image": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "no messages": {"messages": []},
    "another model": {"model": "other"},
    "temperature": {"temperature": -1},
    "no output": {"max_tokens": 0},
    "a word for a number": {"max_tokens": "many"},
    "options of a stream": {"stream_options": {"include_usage": True}},
    "tool choice without tools": {"tool_choice": "required"},
    "unknown tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
}


@pytest.mark.parametrize("path", [CHAT, RENDER])
@pytest.mark.parametrize("case", REFUSED)
async def test_refused_chat(both: Both, case: str, path: str) -> None:
    real, fake = await both.ask(path, ASKED | REFUSED[case])
    alike(real, fake)
    assert real.status in (400, 404)
    if case != "prompt over the context":  # how long it is, the tokenizer says
        assert fake.body == real.body


async def test_long_prompt_says_its_length(both: Both) -> None:
    """vLLM counts one token more than fit, and no further."""
    text = "x y " * CONTEXT
    real, fake = await both.ask(RENDER, ASKED | {"messages": [{"role": "user", "content": text}]})
    alike(real, fake)
    assert real.body["error"]["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, your "
    )
    assert fake.body["error"]["param"] == real.body["error"]["param"] == "input_tokens"


@pytest.mark.parametrize("path", [CHAT, RENDER])
async def test_too_many_log_probs(both: Both, path: str) -> None:
    alike(*await both.ask(path, ASKED | {"logprobs": True, "top_logprobs": 50, "max_tokens": 1}))


@pytest.mark.parametrize("path", [CHAT, RENDER, GENERATE])
@pytest.mark.parametrize(
    "sent",
    [
        {"data": b"{nope", "headers": {"content-type": "application/json"}},
        {"data": b"{}", "headers": {"content-type": "text/plain"}},
        {"data": b"{}", "headers": {"content-type": "application/json"}},
    ],
)
async def test_refused_content(both: Both, path: str, sent: dict[str, Any]) -> None:
    real, fake = await both.ask(path, **sent)
    alike(real, fake)
    assert fake.body["error"]["param"] == real.body["error"]["param"]


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [5] * (CONTEXT + 1), "sampling_params": {}},
        {"token_ids": [5] * (CONTEXT + 1), "sampling_params": {"max_tokens": 5}},
        {"token_ids": [5, VOCABULARY + 1], "sampling_params": {}},
        {"token_ids": [], "sampling_params": {}},
        {"sampling_params": {}},
        {"token_ids": [5]},
        {"token_ids": [5], "sampling_params": {"temperature": -1}},
        {"token_ids": [5], "sampling_params": {"max_tokens": 0}},
        {"token_ids": [5], "sampling_params": {}, "model": "other"},
    ],
)
async def test_refused_generate(both: Both, body: dict[str, Any]) -> None:
    real, fake = await both.ask(GENERATE, body)
    alike(real, fake)
    assert fake.body == real.body
