"""One call in flight: its tokens come out at the plan's pace, until they end, are aborted, or something goes wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from scripted_engine.answers import ChatAnswer, Span
from scripted_engine.plans import Plan
from scripted_engine.server import Connection
from scripted_engine.token_answers import GenerateAnswer

if TYPE_CHECKING:
    from scripted_engine.engine import ScriptedEngine

FAILED = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}


class Run:
    """``key`` is the engine's own id of the request, by which it can be aborted."""

    def __init__(
        self,
        engine: ScriptedEngine,
        connection: Connection,
        key: str,
        plan: Plan,
        answer: ChatAnswer | GenerateAnswer,
        streamed: bool,
    ) -> None:
        self.key, self.plan, self.answer, self.streamed = key, plan, answer, streamed
        self.outcome = answer.outcome
        self.finish: str | None = None
        self.spans: list[Span] = []
        self.count = 0
        self._engine, self._connection = engine, connection
        self._fault = plan.fault if plan.fault and plan.fault.kind else None
        self._waiting: asyncio.Handle | None = None
        self._stalled = False
        self._index = 0
        self._ends = self.outcome.ends
        self._choices = answer.choices() if streamed else []

    def begin(self) -> None:
        plan, engine = self.plan, self._engine
        fault = plan.fault
        if fault is not None and fault.kind == "cut" and fault.after == 0:
            self._end()
            self._connection.abort()
            return
        if self.streamed:
            self._connection.start_stream()
        delay = plan.first_s + (fault.delay_s if fault else 0.0)
        if delay or engine.paused or self.streamed or self._fault or plan.between_s:
            self._later(delay)
        else:
            self._take(len(self.outcome.ids))
            self._close()

    def resume(self) -> None:
        """After a pause, or when the client reads again."""
        if self.finish is None and self._waiting is None and not self._stalled:
            self._later(0)

    def abort(self) -> None:
        """Ends with what there is; with the reason ``abort``."""
        if self.finish is None:
            self.finish = "abort"
            if self.streamed:
                self._open_once()
                self._connection.send(self.answer.aborted(self.count, self.spans))
                self._connection.end_stream()
            else:
                self._connection.respond(200, self.answer.whole(self.count, "abort", self.spans))
            self._end()

    def left(self) -> None:
        """The client is gone."""
        if self.finish is None:
            self.finish = "left"
            self._engine.left.append(self.key)
            self._end()

    def _later(self, delay: float) -> None:
        loop = self._engine.loop
        self._waiting = loop.call_later(delay, self._next) if delay else loop.call_soon(self._next)

    def _next(self) -> None:
        self._waiting = None
        if self.finish is not None or self._engine.holds(self):
            return
        if self._connection.blocked:
            self._connection.when_writable(self.resume)
            return
        if self._fault and self.count >= self._fault.after and self._goes_wrong():
            return
        self._open_once()
        end = self._ends[self._index]
        last = end == len(self.outcome.ids)
        self._take(end)
        if self.streamed:
            event = self.answer.event(self._choices[self._index], self.count, last, self.spans)
            if event:
                self._connection.send(event)
        self._index += 1
        if last:
            self._close()
        else:
            self._later(self.plan.between_s)

    def _open_once(self) -> None:
        if self.streamed and self._index == 0 and self.count == 0 and (opening := self.answer.opening()):
            self._connection.send(opening)

    def _take(self, end: int) -> None:
        version = self._engine.version
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(Span(version, self.count, end))
        self.count = end

    def _close(self) -> None:
        self.finish = self.outcome.finish
        if self.streamed:
            self._connection.send(self.answer.closing(self.count))
            self._connection.end_stream()
        else:
            self._connection.respond(200, self.answer.whole(self.count, self.outcome.finish, self.spans))
        self._end()

    def _goes_wrong(self) -> bool:
        """Whether the fault ended the run, or holds it."""
        fault, self._fault = self._fault, None
        kind = fault.kind if fault else None
        if kind == "cut":
            self.finish = "cut"
            self._connection.abort()
            self._end()
        elif kind == "stall":
            self._stalled = True
        elif kind == "pause":
            self._engine.pause("keep")
            return self._engine.holds(self)
        elif kind == "error":
            self.finish = "error"
            self._fail()
        elif kind == "garbage" and self.streamed:
            self._connection.send(b'data: {"choices": [{"token_ids": [1, \n\n')
            return False
        elif kind == "garbage":
            self.finish = "garbage"
            self._connection.respond(200, b'{"choices": [')
            self._end()
        else:
            return False
        return True

    def _fail(self) -> None:
        body = self._engine.encode({"error": FAILED})
        if self.streamed:
            self._connection.send(b"data: " + body + b"\n\ndata: [DONE]\n\n")
            self._connection.end_stream()
        else:
            self._connection.respond(500, body)
        self._end()

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self.finish is None:
            self.finish = "cut"
        self._engine.ended(self)

    def described(self) -> dict[str, Any]:
        return {"key": self.key, "count": self.count, "finish": self.finish}
