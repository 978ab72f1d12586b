"""The scripted engine streams the demonstrator's tokens as vLLM would, and passes everything else on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from examples.tiny_policy.build import BASH_TOOL, chat
from examples.tiny_policy.demonstrator import FINAL
from examples.tiny_policy.rehearse import parse
from examples.tiny_policy.scripted_engine import ScriptedEngine
from polar.demo.tasks import exercises
from polar.engine import token_api
from polar.engine.chunks import EngineUsage
from polar.engine.client import EngineClient

MODEL = Path("examples/tiny_policy/model")
KNOWN = {exercise.instruction: exercise for exercise in islice(exercises(0), 20)}


async def echo(request: web.Request) -> web.Response:
    """In place of vLLM: says what it was asked."""
    return web.json_response({"asked": f"{request.method} {request.path_qs}", "body": (await request.read()).decode()})


def serve(handler: object) -> TestServer:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    return TestServer(app)


def prompt_ids(tail: list[dict[str, object]]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = chat(next(iter(KNOWN))) + tail
    return tokenizer.encode(
        tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False)
    )


async def test_a_streamed_sample_is_the_demonstrators_and_has_ids_logprobs_versions_and_an_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    function = {"name": "bash", "arguments": {"command": "ls"}}
    acted = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "(no output)"},
    ]
    async with serve(echo) as vllm:
        scripted = ScriptedEngine(str(vllm.make_url("")), MODEL, KNOWN, seed=1)
        async with serve(scripted.handle) as server, EngineClient(str(server.make_url(""))) as client:
            for tail in ([], acted):
                ids = prompt_ids(tail)
                rendered = token_api.Rendered(ids, {}, {})
                async with token_api.generate(client, rendered, rendered.token_json, "test") as stream:
                    chunks = [chunk async for arrived in stream for chunk in arrived]
                choices = [choice for chunk in chunks for choice in chunk.choices]
                sampled = [token for choice in choices for token in choice.token_ids or []]
                logprobs = [t.logprob for choice in choices if choice.logprobs for t in choice.logprobs.content or []]
                assert logprobs == [0.0] * len(sampled)
                assert sampled[-1] == tokenizer.eos_token_id
                assert choices[-1].finish_reason == "stop"
                [span] = choices[-1].weight_versions or []
                assert (span.version, span.start, span.end) == ("0", 0, len(sampled))
                text = tokenizer.decode(sampled[:-1])
                assert text == FINAL if tail else text == FINAL or parse(text)
                assert chunks[-1].usage == EngineUsage(prompt_tokens=len(ids), completion_tokens=len(sampled))


async def test_every_other_request_reaches_the_engine_behind() -> None:
    async with serve(echo) as vllm:
        scripted = ScriptedEngine(str(vllm.make_url("")), MODEL, KNOWN, seed=1)
        async with serve(scripted.handle) as server, EngineClient(str(server.make_url(""))) as client:
            assert (await client.models())["asked"] == "GET /v1/models"
            answer = msgspec.json.decode(await client.post(token_api.RENDER, b'{"messages":[]}'))
            assert answer == {"asked": "POST /v1/chat/completions/render", "body": '{"messages":[]}'}


async def test_an_instruction_that_it_does_not_know_is_refused() -> None:
    engine = ScriptedEngine("http://127.0.0.1:1", MODEL, {}, seed=1)
    with pytest.raises(KeyError):
        engine.sample(prompt_ids([]))
