"""What ``derender`` answers: ids to a chat completion, whole, or in pieces with the state that the client carries."""

from __future__ import annotations

import os
import time
from typing import Any

from scripted_engine.answers import chat_entries, completion, encode, message_body, usage
from scripted_engine.parsing import Delta, difference, told, whole
from scripted_engine.tokens import decode

Json = dict[str, Any]

EMPTY: Json = {
    "prev_tokens": [],
    "prefix_offset": 0,
    "read_offset": 0,
    "role_sent": False,
    "logprob_context_token_ids": [],
    "logprob_text_offset": 0,
    "output_token_ids": [],
    "output_chunk_lens": [],
    "tools_streamed": False,
    "last_tool_call_ids": [],
}


def derender(body: Json, model: str, *, thinks: bool) -> bytes:
    request = body["chat_request"]
    tools = bool(request.get("tools")) and request.get("tool_choice") != "none"
    if body.get("stream") is True:
        return _piece(body, model, tools=tools, thinks=thinks)
    return _whole(body, model, tools=tools, thinks=thinks)


def _whole(body: Json, model: str, *, tools: bool, thinks: bool) -> bytes:
    response, request = body["generate_response"], body["chat_request"]
    choices, count = [], 0
    for choice in response["choices"]:
        ids = choice["token_ids"]
        count += len(ids)
        message = whole(decode(ids), tools=tools, thinks=thinks)
        calls = [(os.urandom(8).hex(), name, arguments) for name, arguments in message.calls]
        given = (choice.get("logprobs") or {}).get("content")
        choices.append(
            {
                "index": choice.get("index", 0),
                "message": message_body(message.content, message.reasoning, calls),
                "logprobs": _logprobs(given) if given is not None else None,
                "finish_reason": choice.get("finish_reason", "stop"),
                "stop_reason": choice.get("stop_reason"),
                "token_ids": ids if request.get("return_token_ids") else None,
                "routed_experts": None,
            }
        )
    said = usage(body.get("prompt_tokens") or 0, count)
    return completion(response["request_id"], body.get("model") or model, choices, said, None, None)


def _logprobs(given: list[Json]) -> Json:
    """The given log-probs under the texts of their ids."""
    entries = chat_entries(tuple(entry["token_id"] for entry in given), 1)
    return {
        "content": [
            mine
            | {
                "logprob": entry["logprob"],
                "top_logprobs": [
                    {"token": decode([top["token_id"]]), "logprob": top["logprob"], "bytes": mine["bytes"]}
                    for top in entry.get("top_logprobs", [])
                ],
            }
            for entry, mine in zip(given, entries, strict=True)
        ]
    }


def _piece(body: Json, model: str, *, tools: bool, thinks: bool) -> bytes:
    chunk, request = body["generate_chunk"], body["chat_request"]
    state = EMPTY | (body.get("stream_state") or {})
    choices = []
    for choice in chunk.get("choices", []):
        ids, before = choice.get("token_ids") or [], state["output_token_ids"]
        known = list(state["last_tool_call_ids"])
        delta = difference(
            told(decode(before), tools=tools, thinks=thinks),
            told(decode([*before, *ids]), tools=tools, thinks=thinks),
            known,
            ended=choice.get("finish_reason") is not None,
        )
        called = state["tools_streamed"] or bool(delta.calls)
        finish = choice.get("finish_reason")
        named = isinstance(request.get("tool_choice"), dict)
        choices.append(
            {
                "index": choice.get("index", 0),
                "delta": _delta(delta, first=not state["role_sent"]),
                "logprobs": None,
                "finish_reason": "tool_calls" if finish and called and not named else finish,
                "stop_reason": choice.get("stop_reason"),
                "token_ids": ids if request.get("return_token_ids") else None,
            }
        )
        state |= {
            "role_sent": True,
            "output_token_ids": [*before, *ids],
            "output_chunk_lens": [*state["output_chunk_lens"], *([len(ids)] if ids else [])],
            "tools_streamed": called,
            "last_tool_call_ids": known,
        }
    said = chunk.get("usage")
    told_usage = (
        usage(body.get("prompt_tokens") or said.get("prompt_tokens") or 0, said["completion_tokens"]) if said else None
    )
    answer = {
        "id": chunk["request_id"],
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model") or model,
        "choices": choices,
        "usage": told_usage | {"prompt_tokens_details": None, "completion_tokens_details": None}
        if told_usage
        else None,
        "system_fingerprint": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "metrics": None,
    }
    return encode({"chunk": answer, "stream_state": state})


def _delta(delta: Delta, *, first: bool) -> Json:
    body: Json = {
        "role": "assistant" if first else None,
        "content": delta.content or None,
        "reasoning": delta.reasoning or None,
    }
    if delta.calls:
        body["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": call.get("type"),
                "index": call["index"],
                "function": {"name": None, "arguments": None} | call["function"],
            }
            for call in delta.calls
        ]
    return body
