"""A stand-in for the gateway: four dialects, no model. It answers each conversation with one tool call, then "done".

It sends the full text of each block in one delta, records all requests, and answers 404 outside ``/s/token``.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

USAGE = 30


class StandIn:
    """``calls``: for each tool a program may offer, the arguments it is called with; the first one offered is used."""

    def __init__(self, calls: dict[str, dict[str, Any]], text: str = "done") -> None:
        self.calls, self.text = calls, text
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.others: list[str] = []
        self.root = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        model_call = re.fullmatch(
            r"/s/token/v1(/chat/completions|/responses|/messages|beta/models/[^/]*:streamGenerateContent)", path
        )
        if request.method != "POST" or not model_call:
            self.others.append(f"{request.method} {path}")
            return web.json_response({"error": {"message": f"no {path} here"}}, status=404)
        body = await request.json()
        self.requests.append((path, body))
        headers = request.headers
        self.keys.append(headers.get("x-api-key") or headers.get("x-goog-api-key") or headers.get("authorization"))
        kind = model_call[1].lstrip("/").split("/")[0]
        events = {"chat": chat, "responses": responses, "messages": messages, "beta": google}[kind](body, self)
        if not body.get("stream") and kind != "beta":
            return web.json_response(events)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            name = f"event: {event['type']}\n" if kind == "messages" else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        if kind == "chat":
            await response.write(b"data: [DONE]\n\n")
        return response

    def call(self, offered: list[str]) -> tuple[str, dict[str, Any]]:
        name = next(name for name in self.calls if name in offered)
        return name, self.calls[name]


def chat(body: dict[str, Any], model: StandIn) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": model.text}
    reason = "stop"
    if body.get("tools") and not any(one["role"] == "tool" for one in body["messages"]):
        name, arguments = model.call([tool["function"]["name"] for tool in body["tools"]])
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"index": 0, "id": "call-1", "type": "function", "function": function}
        message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    usage = {"prompt_tokens": USAGE, "completion_tokens": 5, "total_tokens": USAGE + 5}
    about = {"id": "x", "model": "policy", "created": 1}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {**about, "object": "chat.completion", "choices": [choice], "usage": usage}
    deltas = [{"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": reason}]
    chunk = {**about, "object": "chat.completion.chunk"}
    chunks = [{**chunk, "choices": [{"index": 0, **delta}]} for delta in deltas]
    return [*chunks, {**chunk, "choices": [], "usage": usage}]


def responses(body: dict[str, Any], model: StandIn) -> list[dict[str, Any]]:
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        content = [{"type": "output_text", "text": model.text, "annotations": []}]
        item = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed", "content": content}
    else:
        name, arguments = model.call([tool.get("name", "") for tool in body["tools"]])
        item = {"type": "function_call", "id": "f-1", "call_id": "call-1", "name": name}
        item |= {"arguments": json.dumps(arguments), "status": "completed"}
    usage = {"input_tokens": USAGE, "output_tokens": 5, "total_tokens": USAGE + 5}
    whole = {"id": "r-1", "object": "response", "status": "completed", "output": [item], "usage": usage}
    return [
        {"type": "response.created", "response": {"id": "r-1"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]


def messages(body: dict[str, Any], model: StandIn) -> list[dict[str, Any]]:
    contents = [one["content"] for one in body["messages"] if isinstance(one["content"], list)]
    if any(block["type"] == "tool_result" for blocks in contents for block in blocks):
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta, reason = {"type": "text_delta", "text": model.text}, "end_turn"
    else:
        name, arguments = model.call([tool["name"] for tool in body["tools"]])
        block, reason = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}, "tool_use"
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
    start = {"id": "msg_1", "type": "message", "role": "assistant", "model": "policy", "content": []}
    usage = {"input_tokens": USAGE, "output_tokens": 1}
    return [
        {"type": "message_start", "message": {**start, "stop_reason": None, "stop_sequence": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def google(body: dict[str, Any], model: StandIn) -> list[dict[str, Any]]:
    part: dict[str, Any] = {"text": model.text}
    if not any("functionResponse" in part for content in body["contents"] for part in content["parts"]):
        offered = [one["name"] for tool in body["tools"] for one in tool["functionDeclarations"]]
        name, arguments = model.call(offered)
        part = {"functionCall": {"id": "call-1", "name": name, "args": arguments}}
    usage = {"promptTokenCount": USAGE, "candidatesTokenCount": 5, "totalTokenCount": USAGE + 5}
    candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
    return [{"candidates": [candidate], "usageMetadata": usage}]


@asynccontextmanager
async def serving(model: StandIn):
    """``model.root`` is its address while this is open."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model.root = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/s/token"
    try:
        yield model
    finally:
        await runner.cleanup()
