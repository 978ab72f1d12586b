"""What ``render`` answers: a body for ``generate`` with the sampling parameters that vLLM resolves; and model lists."""

from __future__ import annotations

import os
from typing import Any

Json = dict[str, Any]

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


def rendered(body: Json, ids: list[int], model: str, room: int) -> Json:
    streamed = bool(body.get("stream"))
    options = body.get("stream_options")
    return {
        "request_id": f"chatcmpl-{body.get('request_id') or os.urandom(8).hex()}",
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling_of(body, room),
        "model": body.get("model", model),
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": streamed,
        "stream_options": {"include_usage": False, "continuous_usage_stats": False, **options}
        if streamed and options
        else None,
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority", 0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def sampling_of(body: Json, room: int) -> Json:
    """In vLLM's order; what has vLLM's own default is left out where vLLM leaves it out."""
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    stop = body.get("stop") or []
    given: Json = {
        "presence_penalty": _float(body, "presence_penalty", 0.0),
        "frequency_penalty": _float(body, "frequency_penalty", 0.0),
        "repetition_penalty": _float(body, "repetition_penalty", 1.0),
        "temperature": _float(body, "temperature", 1.0),
        "top_p": _float(body, "top_p", 1.0),
        "top_k": body.get("top_k") or None,
        "min_p": _float(body, "min_p", 0.0),
        "seed": body.get("seed"),
        "stop": [stop] if isinstance(stop, str) else stop,
        "stop_token_ids": body.get("stop_token_ids") or [],
        "ignore_eos": body.get("ignore_eos") or None,
        "max_tokens": min(asked, room) if asked else room,
        "min_tokens": body.get("min_tokens") or None,
        "logprobs": (body.get("top_logprobs") or 0) if body.get("logprobs") else None,
        "skip_special_tokens": False if body.get("tools") and body.get("tool_choice") != "none" else None,
        "output_kind": 1 if body.get("stream") else 2,
        "skip_clone": True,
        "structured_outputs": _constraint(body),
        "logit_bias": {token: float(bias) for token, bias in (body.get("logit_bias") or {}).items()} or None,
        "bad_words": body.get("bad_words") or [],
        "skip_reading_prefix_cache": False,
    }
    return {name: value for name, value in given.items() if value is not None}


def _float(body: Json, name: str, default: float) -> float:
    value = body.get(name)
    return default if value is None else float(value)


def _constraint(body: Json) -> Json | None:
    asked = dict(body.get("structured_outputs") or {})
    form = body.get("response_format") or {}
    if form.get("type") == "json_object":
        asked["json_object"] = True
    elif form.get("type") == "json_schema":
        asked["json"] = form["json_schema"].get("schema")
    forced = body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), dict)
    if forced:
        asked["structural_tag"] = '{"type": "structural_tag"}'
    if not asked:
        return None
    return {name: asked.get(name) for name in CONSTRAINTS} | {
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "structural_tag": asked.get("structural_tag"),
        "_backend": None,
        "_backend_was_auto": False,
    }


def model_list(model: str, max_model_len: int) -> Json:
    """The body of ``/v1/models``."""
    permission = {
        "id": "modelperm-scripted",
        "object": "model_permission",
        "created": 0,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
    }
    return {"object": "list", "data": [card | {"max_model_len": max_model_len, "permission": [permission]}]}
