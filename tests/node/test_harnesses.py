"""The harnesses, for real: Pi in a sandbox against a scripted model, and command lines."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from polar.harnesses import HarnessError, pi, program
from polar.harnesses.packages import installed, located, version
from polar.runtimes.local import LocalRuntime
from schemas.tasks import HarnessSpec, RuntimeSpec

TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "index": 0,
            "id": "call-1",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": "echo hi > a.txt; cat a.txt"})},
        }
    ],
}
"""A model's first answer; after the tool's result it says that it is done."""


class ScriptedModel:
    """An OpenAI server that answers each request that ends in a user message with a tool call, and records all."""

    def __init__(self):
        self.requests = []

    async def complete(self, request):
        body = await request.json()
        self.requests.append((request.path, body))
        tool_done = body["messages"][-1]["role"] == "tool"
        delta, reason = ({"role": "assistant", "content": "done"}, "stop") if tool_done else (TOOL_CALL, "tool_calls")
        usage = {"prompt_tokens": 30_000, "completion_tokens": 5, "total_tokens": 30_005}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": reason}):
            chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}], "usage": usage}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def model():
    scripted, app = ScriptedModel(), web.Application()
    app.router.add_post("/s/token/v1/chat/completions", scripted.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scripted.root = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/s/token"
    yield scripted
    await runner.cleanup()


@pytest.fixture
async def sandbox(tmp_path):
    sandbox = await LocalRuntime(tmp_path / "sessions", hidden=[tmp_path]).create("s", RuntimeSpec())
    yield sandbox
    await sandbox.close()


@pytest.mark.parametrize("instruction", ["Write hi to a.txt", "--help", "@/etc/passwd -p\n/skill:x 'quoted' \"$HOME\""])
async def test_pi_does_a_tool_call_and_no_call_of_its_own(sandbox, model, instruction):
    spec = HarnessSpec(name="pi", options={"system_prompt": "You are an agent.", "max_tokens": 77})
    ended = await sandbox.run(program(spec, instruction, model.root), 60)
    assert (ended.exit_code, ended.stdout.strip(), ended.stderr) == (0, "done", "")
    assert (sandbox.work / "a.txt").read_text() == "hi\n"
    bodies = [body for _, body in model.requests]
    assert len(bodies) == 2, "one call for each turn, and no compaction even near the context's end"
    system, user = bodies[0]["messages"]
    assert user["content"] == [{"type": "text", "text": instruction}]
    head, date, cwd = system["content"].split("\n")
    assert (head, date[:14], cwd) == ("You are an agent.", "Current date: ", "Current working directory: /work")
    assert bodies[1]["messages"][:2] == bodies[0]["messages"]
    assert bodies[1]["messages"][-1]["content"].strip() == "hi"
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["bash"]
    assert {body["max_completion_tokens"] for body in bodies} == {77}
    assert {body["model"] for body in bodies} == {"policy"}


async def test_pi_fails_when_nothing_answers(sandbox, model):
    ended = await sandbox.run(program(HarnessSpec(name="pi"), "do it", model.root + "/wrong"), 60)
    assert ended.exit_code == 1 and "404" in ended.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("codex9", {}, "codex9.*unknown"),
        ("pi", {"tool": ["bash"]}, "tool"),
        ("pi", {"tools": ["bash,read"]}, "bash,read"),
        ("pi", {"max_tokens": 0}, "max_tokens"),
        ("shell", {}, "command"),
        ("shell", {"command": "  "}, "command"),
    ],
)
def test_wrong_options_are_named_in_one_line(name, options, message):
    with pytest.raises(HarnessError, match=message) as error:
        program(HarnessSpec(name=name, options=options), "do it", "http://x/s/t")
    assert "\n" not in str(error.value)


def test_pi_must_be_installed_as_pinned(monkeypatch, tmp_path):
    monkeypatch.setenv("POLAR_HARNESS_DIR", str(tmp_path))
    assert version("pi", pi.PACKAGE) is None and not installed("pi", pi.PACKAGE)
    with pytest.raises(HarnessError, match="polar harness install pi"):
        located("pi", pi.PACKAGE)
    manifest = tmp_path / "pi" / "node_modules" / pi.PACKAGE.package / "package.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"version": "1.6.0"}')
    with pytest.raises(HarnessError, match=r"version 1\.6\.0, not 0\.74\.2"):
        located("pi", pi.PACKAGE)
    manifest.write_text('{"version": "0.74.2"}')
    with pytest.raises(HarnessError, match=r"cli\.js is missing"):
        located("pi", pi.PACKAGE)
    (tmp_path / "pi" / pi.PACKAGE.binary).parent.mkdir()
    (tmp_path / "pi" / pi.PACKAGE.binary).touch()
    with pytest.raises(HarnessError, match=r"node is not installed.*make setup"):
        located("pi", pi.PACKAGE)


async def test_shell_gets_instruction_and_url_and_hides_no_crash(sandbox):
    instruction = "it's $HOME `id`\n--x"
    spec = HarnessSpec(
        name="shell", options={"command": 'printf %s "$POLAR_INSTRUCTION" | tee a; echo $OPENAI_BASE_URL'}
    )
    ended = await sandbox.run(program(spec, instruction, "http://h/s/t"), 20)
    assert ended.stdout == instruction + "http://h/s/t/v1\n"
    crash = HarnessSpec(name="shell", options={"command": "(echo out; exit 9) | tee log"})
    assert (await sandbox.run(program(crash, "x", "http://h"), 20)).exit_code == 9
