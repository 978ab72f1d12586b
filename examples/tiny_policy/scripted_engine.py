"""An engine whose samples are scripted: everything is vLLM's but what ``/inference/v1/generate`` streams.

    python -m examples.tiny_policy.scripted_engine --engine http://127.0.0.1:8000 --port 8001 --model DIR

It stands in front of a real engine and passes every other request on: rendering, tool parsing, health. So a session
with it takes the way of any session, through the gateway, and leaves the demonstrator's tokens as its sample. They
have log-prob 0: the demonstrator was certain. Requests that do not stream (probes of log-probs) are passed on as well.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from transformers import AutoTokenizer

from examples.tiny_policy.demonstrator import reply
from polar.demo.tasks import Exercise, exercises

GENERATE = "/inference/v1/generate"
MOST_EXERCISES = 5000
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


class ScriptedEngine:
    """``exercises`` are those whose instructions it knows."""

    def __init__(self, engine_url: str, model: Path, known: dict[str, Exercise], seed: int) -> None:
        self._engine = engine_url.rstrip("/")
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._exercises = known
        self._rng = random.Random(seed)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request."""
        body = await request.read()
        if request.path == GENERATE and (asked := json.loads(body)).get("stream"):
            return await self._stream(request, asked)
        async with aiohttp.ClientSession() as http:
            url = self._engine + request.path_qs
            headers = {"content-type": request.headers.get("content-type", "application/json")}
            async with http.request(request.method, url, data=body or None, headers=headers) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    def sample(self, prompt_ids: list[int]) -> list[int]:
        """The demonstrator's reply to a rendered chat, as ids, the end-of-turn token included.

        Raises KeyError for an instruction that it does not know.
        """
        turns = TURN.findall(self._tokenizer.decode(prompt_ids))
        messages = [{"role": role, "content": text} for role, text in turns if role != "system"]
        if messages[-1]["content"].startswith("<tool_response>"):
            messages[-1]["role"] = "tool"
        text = reply(messages, self._exercises, self._rng)
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks(asked["token_ids"], self.sample(asked["token_ids"])):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def chunks(prompt_ids: list[int], ids: list[int]) -> list[dict[str, Any]]:
    """vLLM's stream for ``ids``: one chunk a token, the version spans with the finish reason, then the usage."""
    result = []
    for position, token in enumerate(ids):
        last = position == len(ids) - 1
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {"content": [{"token_id": token, "logprob": 0.0, "rank": 1}]},
            "finish_reason": "stop" if last else None,
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}] if last else None,
        }
        prompt = prompt_ids if position == 0 else None
        result.append({"request_id": "scripted", "choices": [choice], "prompt_token_ids": prompt})
    counts = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
    usage = {**counts, "total_tokens": len(prompt_ids) + len(ids)}
    return [*result, {"request_id": "scripted", "choices": [], "usage": usage}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the exercises and of the demonstrator")
    arguments = parser.parse_args()
    known = {exercise.instruction: exercise for exercise in islice(exercises(arguments.seed), MOST_EXERCISES)}
    engine = ScriptedEngine(arguments.engine, arguments.model, known, arguments.seed)
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
