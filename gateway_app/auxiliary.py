"""Which calls are no turn of the agent (a title, a summary, a quota check …), and which (sub-)agent calls. Pure.

A program's own header is believed first, then the openings of its own prompts, then one rule for all: in a session
whose agent has tools, a call without any and with another system prompt. So a program that never uses tools has turns
only, a sub-agent with tools is an agent, and an agent's last turn without tools still has the agent's system prompt.
A call that is taken for no turn is not trained; a doubtful one is taken for a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway_app.dialects.dialect import ModelRequest

Headers = Mapping[bytes, bytes] | Mapping[str, str]
"""Names in lower case, as ASGI gives them."""

MOST_SYSTEMS = 64
"""System prompts that are remembered of a session: one for each kind of sub-agent."""
LONGEST_ID = 200

OPENINGS = {
    "You are a context summarization assistant. Your task is to read a conversation between": "pi.compaction",
    "You are a context summarization agent. You are given a conversation between": "opencode.compaction",
    "You are a title generator. You output ONLY a thread title.": "opencode.title",
    "Generate a title for this conversation:": "opencode.title",
    "Generate a short 2-3 word name that describes this task:": "opencode.name",
    "You are the component that summarizes a conversation when its context window": "qwen_code.compaction",
    "You are a specialized context summarizer that creates a comprehensive markdown": "qwen_code.project_summary",
    "You are a security classifier for an AI coding agent operating in auto mode": "qwen_code.permission",
    "You are a specialized system component responsible for distilling chat history": "gemini_cli.compaction",
    "Critically evaluate the <state_snapshot> you just generated.": "gemini_cli.compaction",
    "You are a specialized Task Routing AI. Your sole function is to analyze": "gemini_cli.router",
    "You are a Task Routing AI. Your sole task is to analyze": "gemini_cli.router",
    "You are a diagnostic agent that determines whether a conversational AI": "gemini_cli.loop_check",
    "You are an expert code-editing assistant. Your task is to analyze a failed edit": "gemini_cli.edit_correction",
    "You are an expert code-editing assistant specializing in debugging": "gemini_cli.edit_correction",
    "Analyze *only* the content and structure of your immediately preceding response": "gemini_cli.next_speaker",
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.": "claude_code.compaction",
    "Your task is to create a detailed summary of the conversation so far,": "claude_code.compaction",
    "Your task is to create a detailed summary of this conversation. This summary": "claude_code.compaction",
    "Your task is to create a detailed summary of the RECENT portion": "claude_code.compaction",
    "You are performing a CONTEXT CHECKPOINT COMPACTION.": "codex.compaction",
    "You are an expert software engineer that generates concise, one-line Git commit": "aider.commit_message",
    "*Briefly* summarize this partial conversation about programming.": "aider.summary",
}
"""How the programs' own prompts begin, as system prompt of a call without tools or as the user's last text."""
QWEN_DIRECTIVE = "Then, produce the <state_snapshot> XML."
"""How Qwen Code ends its request for a summary, which may have the agent's system prompt and tools."""

_OPENING = re.compile("|".join(map(re.escape, sorted(OPENINGS, key=len, reverse=True))))

CLAUDE_CLASSES = frozenset({"compaction", "auxiliary", "side_reply"})
"""Of ``x-claude-code-request-class``, which it sends with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1; main, subagent and
workflow are agents."""
CLAUDE_PROBES = {"quota": "claude_code.quota_check", "test": "claude_code.key_check"}
CLAUDE_TITLES = (frozenset({"title"}), frozenset({"isNewTopic", "title"}))
CODEX_SUBAGENTS = frozenset({"compact", "memory_consolidation", "guardian"})
"""Of ``x-openai-subagent``; the others (review, collab_spawn …) are agents."""


class SeenAgent:
    """What the agent's calls of one attempt have had so far. Empty again after a restart of the gateway."""

    __slots__ = ("_systems",)

    def __init__(self) -> None:
        self._systems: dict[int, None] = {}

    @property
    def tools(self) -> bool:
        """Whether a call had tools."""
        return bool(self._systems)

    def see(self, request: ModelRequest) -> None:
        """Of each call that is a turn."""
        if request.tools:
            self._systems[hash(_system(request))] = None
            if len(self._systems) > MOST_SYSTEMS:
                del self._systems[next(iter(self._systems))]

    def knows(self, request: ModelRequest) -> bool:
        """Whether a call with tools had the same system prompt."""
        return hash(_system(request)) in self._systems


class Thread(msgspec.Struct, frozen=True):
    """The program's own id of the (sub-)agent that calls, and of the one that started it."""

    id: str
    parent_id: str | None = None


def auxiliary(request: ModelRequest, headers: Headers, dialect: str, seen: SeenAgent) -> str | None:
    """The rule that makes this call no turn of the agent (``program.what``), or None for a turn."""
    return (
        _by_codex_headers(request, headers)
        or _by_claude_code(request, headers, dialect)
        or _by_text(request)
        or _by_missing_tools(request, seen)
    )


def threads(headers: Headers, dialect: str) -> Thread | None:
    """By the headers of the programs that send some: Codex, Claude Code, OpenCode, Pi (of Responses)."""
    if session := _id(headers, "x-claude-code-session-id"):
        agent = _id(headers, "x-claude-code-agent-id")
        return Thread(agent, _id(headers, "x-claude-code-parent-agent-id") or session) if agent else Thread(session)
    if thread := _id(headers, "thread-id"):
        return Thread(thread, _id(headers, "x-codex-parent-thread-id"))
    if session := _id(headers, "x-session-id") or (
        _id(headers, "session-id") if dialect == "openai.responses" else None
    ):
        return Thread(session, _id(headers, "x-parent-session-id"))
    return None


def _by_codex_headers(request: ModelRequest, headers: Headers) -> str | None:
    """An unknown kind of request with tools is left to be a turn."""
    if _header(headers, "x-openai-memgen-request").lower() == "true":
        return "codex.memory"
    if (subagent := _header(headers, "x-openai-subagent")) in CODEX_SUBAGENTS:
        return f"codex.{subagent}"
    metadata = _header(headers, "x-codex-turn-metadata")
    if not metadata:
        return None
    try:
        kind = msgspec.json.decode(metadata.encode("latin-1", "replace"), type=_TurnMetadata).request_kind
    except (msgspec.DecodeError, RecursionError):
        return None
    if kind == "compaction" or (kind != "turn" and not request.tools):
        return f"codex.{kind}"
    return None


class _TurnMetadata(msgspec.Struct):
    request_kind: str = "turn"


def _by_claude_code(request: ModelRequest, headers: Headers, dialect: str) -> str | None:
    if dialect != "anthropic.messages" or not _header(headers, "x-claude-code-session-id"):
        return None
    kind = _header(headers, "x-claude-code-request-class")
    if kind in CLAUDE_CLASSES:
        return f"claude_code.{kind}"
    if request.tools:
        return None
    if request.options.get("max_tokens") == 1 and len(request.messages) == 1:
        return CLAUDE_PROBES.get("".join(_texts(request.messages[0])))
    titled = _properties(request.options.get("response_format")) in CLAUDE_TITLES
    return "claude_code.title" if titled else None


def _properties(response_format: Any) -> frozenset[str]:
    """The names of what a JSON schema asks for."""
    for name in ("json_schema", "schema", "properties"):
        response_format = response_format.get(name) if isinstance(response_format, dict) else None
    return frozenset(response_format) if isinstance(response_format, dict) else frozenset()


def _by_text(request: ModelRequest) -> str | None:
    found = None if request.tools else _OPENING.match(_system(request).lstrip())
    if found is None:
        for text in _asked(request):
            if text.endswith(QWEN_DIRECTIVE):
                return "qwen_code.compaction"
            if found := _OPENING.match(text.lstrip()):
                break
    return OPENINGS[found.group()] if found else None


def _by_missing_tools(request: ModelRequest, seen: SeenAgent) -> str | None:
    if request.tools or not seen.tools or seen.knows(request):
        return None
    return "any.no_tools_other_system"


def _system(request: ModelRequest) -> str:
    """The system prompt: all that stands before the conversation begins."""
    texts: list[str] = []
    for message in request.messages:
        if message.get("role") not in ("system", "developer"):
            break
        texts += _texts(message)
    return "\n".join(texts)


def _asked(request: ModelRequest) -> Iterator[str]:
    """The user's texts since the model spoke last, the newest first."""
    for message in reversed(request.messages):
        if message.get("role") == "assistant":
            return
        if message.get("role") == "user":
            yield from reversed(_texts(message))


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def _id(headers: Headers, name: str) -> str | None:
    return _header(headers, name)[:LONGEST_ID] or None


def _header(headers: Any, name: str) -> str:
    """Its value, or the empty text."""
    value = headers.get(name.encode())
    if value is not None:
        return value.decode("latin-1")
    return headers.get(name) or ""
