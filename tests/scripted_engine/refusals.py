"""The requests that vLLM refuses, in its order, with its own words."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """Becomes ``{"error": …}``. ``kind`` is vLLM's error type: that of a body it cannot read differs."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError"):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(where: str, kind: str, said: str, given: str) -> Refusal:
    """What vLLM says of one field that does not fit its type."""
    message = f"1 validation error:\n  {{'type': '{kind}', 'loc': 'body.{where}', 'msg': '{said}', 'input': {given}}}"
    return Refusal(message, f"body.{where}", kind="Bad Request")


def missing(where: str, body: dict[str, Any]) -> Refusal:
    return invalid(where, "missing", "Field required", f"'<dict of {len(body)} items>'")


def not_json() -> Refusal:
    return invalid("1", "json_invalid", "JSON decode error", "'<dict of 0 items>'")


def wrong_media_type() -> Refusal:
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return Refusal(message, kind="Bad Request")


def check_chat(body: dict[str, Any], model: str, *, images: bool) -> None:
    """Raises Refusal for a chat request that vLLM refuses before it renders."""
    if not isinstance(body.get("messages"), list):
        raise missing("messages", body)
    for name in ("max_tokens", "max_completion_tokens", "top_logprobs", "n"):
        value = body.get(name)
        if value is not None and not isinstance(value, int):
            said = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid(name, "int_parsing", said, repr(value))
    if body.get("stream_options") and not body.get("stream"):
        said = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise Refusal(said, "stream_options")
    _check_tool_choice(body)
    if body.get("model") not in (None, model):
        said = f"The model `{body['model']}` does not exist. Valid aliases: {model}."
        raise Refusal(said, "model", status=404, kind="NotFoundError")
    if not body["messages"]:
        raise Refusal("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if not images and any(_has_image(message) for message in body["messages"]):
        raise Refusal(f"{model} is not a multimodal model")


def _check_tool_choice(body: dict[str, Any]) -> None:
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return
    if not body.get("tools"):
        said = "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)"
        raise Refusal(said, "tool_choice")
    if isinstance(choice, dict) and choice.get("function", {}).get("name") not in [
        tool["function"]["name"] for tool in body["tools"]
    ]:
        said = "The tool specified in `tool_choice` does not match any of the specified `tools` (parameter=tool_choice)"
        raise Refusal(said, "tool_choice")


def _has_image(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "image_url" for part in content
    )


def check_length(count: int, asked: int | None, limit: int) -> None:
    """``asked`` are the output tokens that the request names."""
    if asked is not None and asked > limit:
        said = f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens. "
        raise Refusal(said + f"(parameter=max_tokens, value={asked})", "max_tokens")
    if count > limit:
        at_least = "at least " if count == limit + 1 else ""
        said = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {at_least}{count} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={count})"
        )
        raise Refusal(said, "input_tokens")


def check_sampling(sampling: dict[str, Any]) -> None:
    temperature = sampling.get("temperature")
    if temperature is not None and temperature < 0:
        said = f"temperature must be non-negative, got {float(temperature)}. "
        raise Refusal(said + f"(parameter=temperature, value={float(temperature)})", "temperature")
    most = sampling.get("max_tokens")
    if most is not None and most < 1:
        raise Refusal(f"max_tokens must be at least 1, got {most}. (parameter=max_tokens, value={most})", "max_tokens")


def check_top_logprobs(count: int | None) -> None:
    if count is not None and count > 20:
        said = f"Requested sample logprobs of {count}, which is greater than max allowed: 20 "
        raise Refusal(said + f"(parameter=logprobs, value={count})", "logprobs")


def check_generate(body: dict[str, Any], limit: int, vocabulary: int) -> None:
    """Raises Refusal for ids that vLLM does not sample from."""
    ids = body.get("token_ids")
    if not isinstance(ids, list):
        raise missing("token_ids", body)
    if not ids:
        context = "'ctx': {'field_type': 'List', 'min_length': 1, 'actual_length': 0}"
        said = "List should have at least 1 item after validation, not 0"
        raise invalid("token_ids", "too_short", said, f"'<list of 0 items>', {context}")
    if not isinstance(body.get("sampling_params"), dict):
        raise missing("sampling_params", body)
    check_sampling(body["sampling_params"])
    check_top_logprobs(body["sampling_params"].get("logprobs"))
    if len(ids) > limit:
        if body["sampling_params"].get("max_tokens") is None:
            raise Refusal(f"Input length ({len(ids)}) exceeds model's maximum context length ({limit}).")
        raise Refusal(
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {limit}. "
            "Make sure that `max_model_len` is no smaller than the number of text tokens."
        )
    if max(ids) >= vocabulary:
        raise Refusal(f"Token id {max(ids)} is out of vocabulary")


def check_derender(body: dict[str, Any]) -> None:
    """Raises Refusal where a parser could not do its work."""
    streamed = body.get("stream") is True
    name = "generate_chunk" if streamed else "generate_response"
    if not isinstance(body.get(name), dict):
        raise missing(name, body)
    request = body.get("chat_request")
    if request is not None and request.get("stream_options") and not request.get("stream"):
        said = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise Refusal(said, "stream_options")
    if request is None:
        raise Refusal(
            "chat_request is required when a tool or reasoning parser is configured because plain detokenization "
            "would leak raw parser markup into content."
        )
    if streamed and body.get("prompt_token_ids") is None:
        raise Refusal(
            "prompt_token_ids is required when a tool or reasoning parser is configured. Without it parse_delta cannot "
            "tell whether the prompt left reasoning open (e.g. a chat template that pre-opens <think>) and would "
            "misclassify reasoning content as plain content."
        )
    state = body.get("stream_state") or {}
    if sum(state.get("output_chunk_lens") or []) != len(state.get("output_token_ids") or []):
        raise invalid("stream_state", "value_error", "output_chunk_lens must sum to len(output_token_ids)", "…")
    for choice in body[name].get("choices", []):
        if not streamed and not choice.get("token_ids"):
            raise Refusal(f"choice {choice.get('index', 0)} has empty or null token_ids")
