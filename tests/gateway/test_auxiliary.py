"""Side calls of the programs are known as such, by their own headers and texts; turns of any agent are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_app.auxiliary import MOST_SYSTEMS, OPENINGS, QWEN_DIRECTIVE, SeenAgent, Thread, auxiliary, threads
from gateway_app.dialects.dialect import ModelRequest

CHAT, MESSAGES, RESPONSES, GOOGLE = "openai.chat", "anthropic.messages", "openai.responses", "google.generate"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
AGENT = "You are a coding agent."
CLAUDE = {"x-claude-code-session-id": "c1"}


def request(*said: tuple[str, Any], tools: bool = True, **options: Any) -> ModelRequest:
    messages = [{"role": role, "content": content} for role, content in said]
    return ModelRequest(model="policy", messages=messages, tools=TOOLS if tools else [], options=options)


TURN = request(("system", AGENT), ("user", "write a file"))
LATER = request(("system", AGENT), ("user", "write a file"), ("assistant", "done"), ("tool", "ok"))


def seen(*turns: ModelRequest) -> SeenAgent:
    agent = SeenAgent()
    for turn in turns:
        agent.see(turn)
    return agent


def rule(asked: ModelRequest, dialect: str = CHAT, agent: SeenAgent | None = None, **headers: str) -> str | None:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return auxiliary(asked, named, dialect, agent or SeenAgent())


def metadata(kind: str) -> str:
    return json.dumps({"session_id": "s", "window_id": "s:0", "request_kind": kind, "window_number": 0})


@pytest.mark.parametrize(
    ("kind", "tools", "named"),
    [
        ("turn", True, None),
        ("turn", False, None),
        ("compaction", False, "codex.compaction"),
        ("compaction", True, "codex.compaction"),
        ("title", False, "codex.title"),
        ("something_new", True, None),
    ],
)
def test_codex_says_what_kind_a_request_is(kind, tools, named):
    asked = request(("developer", AGENT), ("user", "go"), tools=tools)
    assert rule(asked, RESPONSES, x_codex_turn_metadata=metadata(kind)) == named


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"request_kind": 3}', "[" * 5000])
def test_metadata_that_cannot_be_read_makes_a_turn(broken):
    assert rule(TURN, RESPONSES, x_codex_turn_metadata=broken) is None


@pytest.mark.parametrize(
    ("subagent", "named"),
    [
        ("review", None),
        ("collab_spawn", None),
        ("compact", "codex.compact"),
        ("memory_consolidation", "codex.memory_consolidation"),
    ],
)
def test_some_sub_agents_of_codex_are_none(subagent, named):
    assert rule(TURN, RESPONSES, x_openai_subagent=subagent, x_codex_turn_metadata=metadata("turn")) == named
    assert rule(TURN, RESPONSES, x_openai_memgen_request="true") == "codex.memory"


def title(properties: dict[str, Any], **more: Any) -> ModelRequest:
    schema = {"name": "output", "schema": {"type": "object", "properties": properties}}
    asked = [("system", "Write a title."), ("user", "<session>write a file</session>")]
    return request(*asked, tools=False, response_format={"type": "json_schema", "json_schema": schema}, **more)


def test_claude_code_asks_for_titles_and_tries_its_quota():
    text = {"type": "string"}
    assert auxiliary(title({"title": text}), CLAUDE, MESSAGES, SeenAgent()) == "claude_code.title"
    assert auxiliary(title({"isNewTopic": text, "title": text}), CLAUDE, MESSAGES, SeenAgent()) == "claude_code.title"
    quota = request(("user", "quota"), tools=False, max_tokens=1)
    assert auxiliary(quota, CLAUDE, MESSAGES, SeenAgent()) == "claude_code.quota_check"
    probe = request(("user", [{"type": "text", "text": "test"}]), tools=False, max_tokens=1)
    assert auxiliary(probe, CLAUDE, MESSAGES, SeenAgent()) == "claude_code.key_check"


def test_another_program_may_ask_for_the_same_as_its_turn():
    assert rule(title({"title": {}}), MESSAGES) is None
    assert rule(request(("user", "quota"), tools=False, max_tokens=1), MESSAGES) is None
    assert auxiliary(title({"title": {}, "body": {}}), CLAUDE, MESSAGES, SeenAgent()) is None
    assert auxiliary(request(("user", "quota"), max_tokens=1), CLAUDE, MESSAGES, SeenAgent()) is None
    assert auxiliary(request(("user", "quota"), tools=False, max_tokens=9), CLAUDE, MESSAGES, SeenAgent()) is None


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("main", None),
        ("subagent", None),
        ("workflow", None),
        ("compaction", "claude_code.compaction"),
        ("auxiliary", "claude_code.auxiliary"),
        ("side_reply", "claude_code.side_reply"),
    ],
)
def test_claude_code_says_the_class_of_a_request_where_it_was_told_to(kind, named):
    headers = CLAUDE | {"x-claude-code-request-class": kind}
    assert auxiliary(LATER, headers, MESSAGES, SeenAgent()) == named


SUMMARY = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed summary of …"


@pytest.mark.parametrize("text", [SUMMARY, [{"type": "text", "text": "go on"}, {"type": "text", "text": SUMMARY}]])
def test_claude_codes_compaction_has_the_agents_tools_and_system(text):
    history = [("system", AGENT), ("user", "write a file"), ("assistant", "done"), ("tool", "ok")]
    assert rule(request(*history, ("user", text)), MESSAGES, seen(TURN)) == "claude_code.compaction"
    assert rule(request(*history, ("user", text), ("assistant", "summary"), ("user", "go on")), MESSAGES) is None


def test_qwen_codes_compaction_may_have_the_agents_tools_and_system():
    asked = f"Do not call tools. First, reason in your <analysis> block. {QWEN_DIRECTIVE}"
    assert rule(request(("system", AGENT), ("assistant", "done"), ("user", asked)), CHAT) == "qwen_code.compaction"


@pytest.mark.parametrize(("opening", "named"), OPENINGS.items())
def test_the_programs_own_prompts_are_known(opening, named):
    """As system prompt without tools, or as what the user said last."""
    assert rule(request(("system", f"\n{opening} And more."), ("user", "<chat>"), tools=False)) == named
    assert rule(request(("system", AGENT), ("assistant", "…"), ("user", f"{opening} And more."))) == named
    assert rule(request(("system", f"{opening} And more."), ("user", "go"))) is None, "an agent has tools"
    assert rule(request(("system", AGENT), ("user", f"What does '{opening}' mean?"))) is None
    assert rule(request(("user", opening), ("assistant", "…"), ("user", "go on"))) is None


def test_a_call_without_tools_and_with_another_system_prompt_is_no_turn_where_the_agent_has_tools():
    other = request(("system", "Summarise the page."), ("user", "<html>"), tools=False)
    none = request(("user", "<html>"), tools=False)
    assert rule(other) is None and rule(none) is None, "nothing is known of the agent yet"
    agent = seen(TURN)
    assert rule(other, agent=agent) == rule(none, agent=agent) == "any.no_tools_other_system"


def test_an_agents_last_turn_without_tools_is_its_turn():
    last = request(("system", AGENT), ("user", "write a file"), ("assistant", "done"), ("user", "sum up"), tools=False)
    assert rule(last, agent=seen(TURN)) is None
    assert rule(request(("system", "Other."), ("user", "x"), tools=False), agent=seen(TURN)) is not None


def test_a_sub_agent_with_tools_is_an_agent():
    sub = request(("system", "You are a search agent."), ("user", "find it"))
    agent = seen(TURN)
    assert rule(sub, agent=agent) is None
    agent.see(sub)
    last = request(("system", "You are a search agent."), ("user", "find it"), ("assistant", "here"), tools=False)
    assert rule(last, agent=agent) is None


def test_a_program_that_never_uses_tools_has_turns_only():
    agent = SeenAgent()
    for number in range(5):
        turn = request(("system", f"Edit files. {number}"), ("user", "go"), tools=False)
        assert rule(turn, agent=agent) is None
        agent.see(turn)
    assert not agent.tools


def test_only_so_many_system_prompts_are_remembered():
    agents = [request(("system", f"agent {number}"), ("user", "go")) for number in range(MOST_SYSTEMS + 1)]
    agent = seen(*agents)
    assert [agent.knows(one) for one in agents] == [False] + [True] * MOST_SYSTEMS


@pytest.mark.parametrize(
    ("headers", "dialect", "thread"),
    [
        ({"thread-id": "t1", "session-id": "s1"}, RESPONSES, Thread("t1")),
        (
            {"thread-id": "t2", "session-id": "s1", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "review"},
            RESPONSES,
            Thread("t2", "t1"),
        ),
        (CLAUDE, MESSAGES, Thread("c1")),
        (CLAUDE | {"x-claude-code-agent-id": "a1"}, MESSAGES, Thread("a1", "c1")),
        (
            CLAUDE | {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            MESSAGES,
            Thread("a2", "a1"),
        ),
        ({"x-session-id": "o1", "x-session-affinity": "o1"}, CHAT, Thread("o1")),
        ({"x-session-id": "o2", "x-parent-session-id": "o1"}, MESSAGES, Thread("o2", "o1")),
        ({"session-id": "p1"}, RESPONSES, Thread("p1")),
        ({"session-id": "p1"}, CHAT, None),
        ({"x-session": "S1", "authorization": "Bearer key"}, CHAT, None),
        ({"thread-id": ""}, RESPONSES, None),
        ({"thread-id": "t" * 1000}, RESPONSES, Thread("t" * 200)),
    ],
)
def test_the_programs_name_their_threads(headers, dialect, thread):
    assert threads(headers, dialect) == thread
    assert threads({name.encode(): value.encode() for name, value in headers.items()}, dialect) == thread


contents = st.text() | st.none() | st.lists(st.dictionaries(st.sampled_from(["type", "text"]), st.text() | st.none()))
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
messages = st.lists(st.fixed_dictionaries({"role": roles}, optional={"content": contents}))
names = st.sampled_from(["thread-id", "x-codex-turn-metadata", "x-openai-subagent", "x-claude-code-session-id"])


@given(messages, st.booleans(), st.dictionaries(names, st.text()), st.sampled_from([CHAT, MESSAGES, RESPONSES, GOOGLE]))
def test_any_turn_with_tools_of_an_unknown_program_is_a_turn(said, known, headers, dialect):
    asked = ModelRequest(model="m", messages=said, tools=TOOLS)
    agent = seen(TURN) if known else SeenAgent()
    assert auxiliary(asked, headers, dialect, agent) is None
    threads(headers, dialect)
    agent.see(asked)
    assert agent.knows(without_tools(asked))
    assert auxiliary(without_tools(asked), {}, dialect, agent) is None


def without_tools(asked: ModelRequest) -> ModelRequest:
    return ModelRequest(model=asked.model, messages=asked.messages)
