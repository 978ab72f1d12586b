"""Holds back what may be the beginning of a stop string, and cuts it off where it ended the response.

The engine's token endpoints return the stop string's tokens, which belong to the sample but not to the client's text.
"""

from __future__ import annotations

import msgspec

from gateway_app.dialects.dialect import Delta


class StopCut:
    """Of one response. Without stop strings it passes everything on."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._hold = max(map(len, self._stops), default=1) - 1
        self._held = {"content": "", "reasoning": ""}

    def take(self, delta: Delta) -> Delta | None:
        """What can be shown now; None for nothing."""
        if not self._stops:
            return delta
        reasoning = self._pass("reasoning", delta.reasoning)
        if delta.content or delta.tool_calls:
            reasoning += self._ended("reasoning")
        content = self._pass("content", delta.content)
        if delta.tool_calls:
            content += self._ended("content")
        changed = msgspec.structs.replace(delta, content=content, reasoning=reasoning)
        return changed if content or reasoning or changed.tool_calls or changed.logprobs else None

    def rest(self, stop: str | None) -> Delta | None:
        """What was held back, up to ``stop``, the string that ended the response."""
        held = {name: text.partition(stop)[0] if stop else text for name, text in self._held.items()}
        self._held = dict.fromkeys(self._held, "")
        return Delta(content=held["content"], reasoning=held["reasoning"]) if any(held.values()) else None

    def _pass(self, name: str, text: str) -> str:
        whole = self._held[name] + text
        found = [place for stop in self._stops if (place := whole.find(stop)) >= 0]
        shown = min(found) if found else max(0, len(whole) - self._hold)
        self._held[name] = whole[shown:]
        return whole[:shown]

    def _ended(self, name: str) -> str:
        """What was held back of a text that something else follows: no stop string goes on there."""
        held = self._held[name]
        if any(stop in held for stop in self._stops):
            return ""
        self._held[name] = ""
        return held
