"""Calls beside the agent's own: side calls are recorded and not trained, sub-agents are linked to who started them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dialect_calls import ask, root
from gateway_stand import stand, story
from scripted_engine import Plan, ScriptedEngine
from session_stories import ending, fold, opened

from polar.trajectories import assemble, whole_calls
from schemas.ids import new_id
from schemas.sessions import CallStarted

pytestmark = pytest.mark.kafka

TEXT = "a reply of a few words"
TITLE = "You are a title generator. You output ONLY a thread title."

SIDE_CALLS: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "by the program's text": (
        "openai.chat",
        {},
        {"messages": [{"role": "system", "content": TITLE}, {"role": "user", "content": "hi"}], "tools": []},
        "opencode.title",
    ),
    "by a header of Codex": ("openai.responses", {"x-openai-subagent": "compact"}, {}, "codex.compact"),
    "by a header of Claude Code": (
        "anthropic.messages",
        {"x-claude-code-session-id": "s", "x-claude-code-request-class": "compaction"},
        {},
        "claude_code.compaction",
    ),
    "by missing tools": (
        "google.generate",
        {},
        {"systemInstruction": {"parts": [{"text": "sum it up"}]}, "tools": [], "toolConfig": {}},
        "any.no_tools_other_system",
    ),
}


@pytest.mark.parametrize("name", SIDE_CALLS)
@pytest.mark.parametrize("api", ["tokens", "chat"])
async def test_a_side_call_is_recorded_with_its_rule_and_not_trained(
    tmp_path: Path, kafka: str, name: str, api: Any
) -> None:
    dialect, headers, changes, rule = SIDE_CALLS[name]
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url, engine_api=api) as gateway:
        base = root(gateway, session)
        assert (await ask(gateway, base, dialect)).text() == TEXT
        assert (await ask(gateway, base, dialect, headers=headers, **changes)).text() == TEXT
    events = await story(kafka, session)
    starts = [event for event in events if isinstance(event, CallStarted)]
    assert [start.auxiliary for start in starts] == [None, rule]
    view = fold([opened(session), *events, *ending(session)], session)
    assert len(assemble(view).traces) == 1
    assert [call.trained for call in whole_calls(view)] == [True, False]


HEADERS: dict[str, tuple[str, dict[str, str], dict[str, str], str, str]] = {
    "claude": (
        "anthropic.messages",
        {"x-claude-code-session-id": "main"},
        {"x-claude-code-session-id": "main", "x-claude-code-agent-id": "sub"},
        "main",
        "sub",
    ),
    "codex": (
        "openai.responses",
        {"thread-id": "main"},
        {"thread-id": "sub", "x-codex-parent-thread-id": "main"},
        "main",
        "sub",
    ),
    "opencode": (
        "openai.chat",
        {"x-session-id": "main"},
        {"x-session-id": "sub", "x-parent-session-id": "main"},
        "main",
        "sub",
    ),
}


@pytest.mark.parametrize("program", HEADERS)
async def test_a_sub_agents_call_is_linked_to_its_parent(tmp_path: Path, kafka: str, program: str) -> None:
    dialect, agent, sub_agent, thread, sub_thread = HEADERS[program]
    session, engine = new_id(), ScriptedEngine(Plan(content=TEXT))
    async with engine.serving(), stand(tmp_path, kafka, engine.url) as gateway:
        base = root(gateway, session)
        for headers in (agent, sub_agent):
            assert (await ask(gateway, base, dialect, headers=headers)).text() == TEXT
    first, second = [event for event in await story(kafka, session) if isinstance(event, CallStarted)]
    assert (first.thread_id, first.parent_call_id) == (thread, None)
    assert (second.thread_id, second.parent_call_id) == (sub_thread, first.call_id)
    assert first.auxiliary is second.auxiliary is None
