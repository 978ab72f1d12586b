"""What a model says so that each agent program writes hello.txt with the text hello, and then finishes.

``SCRIPTS[preset]`` is a list of turns. A turn is an assistant's message: ``content``, and ``tool_calls`` of ``name``
and ``arguments`` in the preset's own tools. Every program asks for exactly as many samples as there are turns.
Aider has no tools: it edits by the text of its one answer, and ends the file with a newline.
"""

from __future__ import annotations

from typing import Any

INSTRUCTION = "Write hello.txt with the text hello, then finish."
WORK = "/work"


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"name": name, "arguments": arguments}]}


DONE: dict[str, Any] = {"content": "The file is written.", "tool_calls": []}

SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "codex": [call("exec_command", cmd="printf hello > hello.txt"), DONE],
    "claude_code": [call("Write", file_path=f"{WORK}/hello.txt", content="hello"), DONE],
    "qwen_code": [call("write_file", file_path=f"{WORK}/hello.txt", content="hello"), DONE],
    "pi": [call("bash", command="printf hello > hello.txt"), DONE],
    "gemini_cli": [call("write_file", file_path=f"{WORK}/hello.txt", content="hello"), DONE],
    "opencode": [call("write", filePath=f"{WORK}/hello.txt", content="hello"), DONE],
    "mini_swe_agent": [
        call("bash", command="printf hello > hello.txt"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "aider": [{"content": "Here it is.\n\nhello.txt\n```\nhello\n```\n", "tool_calls": []}],
}
