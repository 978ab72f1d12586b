"""The whole reply that the deltas of a stream add up to."""

from __future__ import annotations

from typing import Any

from gateway_app.dialects.dialect import Delta, Reply, ToolCall


class GrowingReply:
    """Grows with each delta."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, ["", "", ""])
            call[0] = call[0] or piece.id or ""
            call[1] += piece.name or ""
            call[2] += piece.arguments
        if delta.logprobs:
            self._logprobs += delta.logprobs

    def whole(self) -> Reply:
        return Reply(
            content="".join(self._content) if self._content else None,
            reasoning="".join(self._reasoning) or None,
            tool_calls=[ToolCall(id=c[0], name=c[1], arguments=c[2]) for _, c in sorted(self._calls.items())],
            logprobs=self._logprobs or None,
        )
