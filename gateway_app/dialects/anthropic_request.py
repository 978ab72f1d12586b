"""A request of Anthropic's Messages API in chat shape.

What has no meaning for sampling is dropped: ``metadata``, ``cache_control``, ``context_management`` (nothing is cleared
here), block fields that we do not know, and Claude Code's attribution line, which changes with every conversation.
What has a meaning and cannot be served is refused by name.

A user message becomes the ``tool`` messages of its results, then one ``user`` message: images of the results first, as
no chat template is sure to take images in a tool message, then the message's own parts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway_app.dialects.dialect import BadRequest, ModelRequest, Reply, ToolCall
from gateway_app.dialects.wire import decoded

UNPARSED = "__unparsedToolInput"
"""Claude Code sends ``{UNPARSED: {"raw", "len"}}`` as the input of a call whose arguments were no JSON object.

``raw`` holds at most 2048 characters, ``len`` counts all of them, in UTF-16 units.
"""

ATTRIBUTION = "x-anthropic-billing-header"

SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
"""Tools that the provider runs itself: a model that is not shown one of them just works without it."""

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Some engines refuse what is above high."""


class Block(msgspec.Struct, frozen=True):
    """A content block of any type; each type has its own of these fields."""

    type: str
    text: str | None = None
    source: Any = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: Any = None
    is_error: bool | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: str


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    format: OutputFormat | None = None
    effort: str | None = None


class Body(msgspec.Struct, frozen=True):
    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: int | None = None
    """A request to count tokens has none."""
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: list[Any] | None = None
    stream: bool | None = None


BODY = msgspec.json.Decoder(Body)


def parse_request(content: bytes, model: str | None, streamed: bool) -> ModelRequest:
    """Raises BadRequest."""
    body: Body = decoded(BODY, content)
    name = model or body.model
    if not name:
        raise BadRequest("model: a string is needed", "model")
    if body.mcp_servers:
        raise BadRequest("mcp_servers: there are none here; give their tools in tools", "mcp_servers")
    messages = _system(body.system, "system") if body.system else []
    for index, message in enumerate(body.messages):
        messages += _message(message, f"messages[{index}]")
    options = _sampling(body)
    if body.messages and body.messages[-1].role == "assistant":
        options |= _continued(messages[-1])
    return ModelRequest(
        model=name,
        messages=messages,
        tools=_tools(body),
        options=options,
        streamed=streamed or bool(body.stream),
    )


def _message(message: Message, at: str) -> list[dict[str, Any]]:
    if message.role == "system":
        return _system(message.content, at)
    if message.role == "assistant":
        return [_assistant(message.content, at)]
    if message.role == "user":
        return _user(message.content, at)
    raise BadRequest(f"{at}.role: user, assistant or system, not {message.role!r}", f"{at}.role")


def _system(content: str | list[Block], at: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_text(block, f"{at}[{index}]") for index, block in enumerate(content)]
    kept = [text.partition("\n")[2] if text.startswith(ATTRIBUTION) else text for text in texts]
    parts = [_text_part(text) for text, whole in zip(kept, texts, strict=True) if text or not whole]
    return [{"role": "system", "content": _shortest(parts)}] if parts else []


def _assistant(content: str | list[Block], at: str) -> dict[str, Any]:
    if isinstance(content, str):
        return Reply(content=content).message()
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(content):
        here = f"{at}.content[{index}]"
        if block.type == "text":
            texts.append(_text(block, here))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, here))
        elif block.type != "redacted_thinking":
            raise _unserved(block, here)
    reply = Reply(content="".join(texts) if texts else None, reasoning="".join(thoughts) or None, tool_calls=calls)
    return reply.message()


def _call(block: Block, at: str) -> ToolCall:
    if not block.id or not block.name:
        raise BadRequest(f"{at}: a tool_use block needs id and name", at)
    try:
        value = msgspec.json.decode(block.input)
        arguments = bytes(block.input).decode()
    except (msgspec.MsgspecError, RecursionError):
        raise BadRequest(f"{at}.input: no JSON that can be read", f"{at}.input") from None
    if not isinstance(value, dict):
        raise BadRequest(f"{at}.input: Expected `object`", f"{at}.input")
    unparsed = value.get(UNPARSED)
    if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
        arguments = unparsed["raw"]
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _user(content: str | list[Block], at: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        here = f"{at}.content[{index}]"
        if block.type == "tool_result":
            results.append(_result(block, here, images))
        elif block.type == "text":
            parts.append(_text_part(_text(block, here)))
        elif block.type == "image":
            parts.append(_image_part(block, here))
        else:
            raise _unserved(block, here)
    parts = images + parts
    if parts or not results:
        results.append({"role": "user", "content": _shortest(parts)})
    return results


def _result(block: Block, at: str, images: list[dict[str, Any]]) -> dict[str, Any]:
    """``is_error`` has no place in chat shape: what went wrong stands in the text."""
    if not block.tool_use_id:
        raise BadRequest(f"{at}.tool_use_id: a string is needed", f"{at}.tool_use_id")
    texts: list[str] = []
    for index, item in enumerate(_result_blocks(block.content, at)):
        here = f"{at}.content[{index}]"
        if item.type == "text":
            texts.append(_text(item, here))
        elif item.type == "image":
            images.append(_image_part(item, here))
        elif item.type == "tool_reference":
            texts.append(item.tool_name or item.name or "")
        else:
            raise _unserved(item, here)
    text = "\n".join(texts) or ("Error" if block.is_error else "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _result_blocks(content: Any, at: str) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    try:
        return msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{at}.content: {error}", f"{at}.content") from None


def _text(block: Block, at: str) -> str:
    if block.type != "text":
        raise _unserved(block, at)
    if block.text is None:
        raise BadRequest(f"{at}.text: a string is needed", f"{at}.text")
    return block.text


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_part(block: Block, at: str) -> dict[str, Any]:
    source = block.source if isinstance(block.source, dict) else {}
    kind, media, data, url = (source.get(name) for name in ("type", "media_type", "data", "url"))
    if kind == "base64" and isinstance(media, str) and isinstance(data, str):
        url = f"data:{media};base64,{data}"
    elif kind != "url" or not isinstance(url, str):
        raise BadRequest(
            f"{at}.source: an image is served from base64 (media_type, data) or from a url", f"{at}.source"
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _shortest(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text is a string, so that a program may write it either way."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _unserved(block: Block, at: str) -> BadRequest:
    hint = "; give its text in a text block" if block.type in ("document", "search_result") else ""
    return BadRequest(f"{at}: a block of type {block.type!r} cannot be served here{hint}", at)


def _continued(last: dict[str, Any]) -> dict[str, Any]:
    """The model goes on with the text with which the request ends."""
    if last.get("tool_calls"):
        raise BadRequest("messages: the last message has tool_use blocks, and no tool_result follows", "messages")
    if not last["content"]:
        raise BadRequest("messages: the last message is the assistant's and has no text to go on with", "messages")
    return {"continue_final_message": True, "add_generation_prompt": False}


def _tools(body: Body) -> list[dict[str, Any]]:
    """A tool that has a schema is the client's; a provider's own one is left out where others remain."""
    tools = []
    chosen = body.tool_choice.name if body.tool_choice else None
    left_out = ""
    for index, tool in enumerate(body.tools or []):
        at = f"tools[{index}]"
        kind = tool.type or "custom"
        if not tool.name:
            raise BadRequest(f"{at}.name: a string is needed", f"{at}.name")
        if tool.input_schema is not None:
            tools.append(_function(tool, tool.input_schema))
        elif kind.startswith(SERVER_TOOLS) and tool.name != chosen:
            left_out = f"{at}: {kind!r} is a tool that the provider runs; there is none here"
        else:
            raise BadRequest(f"{at}: {kind!r} cannot be served without an input_schema", f"{at}.input_schema")
    if left_out and not tools:
        raise BadRequest(left_out, "tools")
    return tools


def _function(tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = schema if "type" in schema else {"type": "object"} | schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _sampling(body: Body) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    if body.tool_choice:
        options |= _tool_choice(body.tool_choice, bool(body.tools))
    if body.thinking and body.thinking.type in ("enabled", "disabled"):
        options["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    config = body.output_config or OutputConfig()
    options["reasoning_effort"] = EFFORTS.get(config.effort or "")
    wanted = config.format or body.output_format
    if wanted:
        options["response_format"] = _response_format(wanted)
    return {name: value for name, value in options.items() if value is not None}


def _tool_choice(choice: ToolChoice, with_tools: bool) -> dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise BadRequest("tool_choice.name: a string is needed", "tool_choice.name")
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in ("auto", "any", "none"):
        chosen = "required" if choice.type == "any" else choice.type
    else:
        raise BadRequest(f"tool_choice.type: auto, any, tool or none, not {choice.type!r}", "tool_choice.type")
    if not with_tools and chosen not in ("auto", "none"):
        raise BadRequest("tool_choice: there are no tools to choose from", "tool_choice")
    options = {"tool_choice": chosen} if with_tools else {}
    if choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def _response_format(wanted: OutputFormat) -> dict[str, Any]:
    if wanted.type != "json_schema" or wanted.schema is None:
        raise BadRequest("output_config.format: json_schema with a schema is served", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema}}
