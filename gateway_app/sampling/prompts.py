"""The prompt of a call: rendered by the chat template, or spliced so that history keeps the ids that were sampled.

A worked example. Turn 1 had the prompt P and sampled R, which ends with the end-of-turn token E. Turn 2 sends the same
history, the reply and a tool result. Rendered is only a short stand-in, "user: ., assistant: ., tool: result": its ids
are U E A E T, where U E is the stand-in's beginning, rendered once a session. What follows the E that ends A, here T,
is what the template puts after a reply. So the prompt of turn 2 is P R T, and nothing of P and R was rendered again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from gateway_app.call import Call
from gateway_app.failures import context_overflow
from gateway_app.history import Base, Match
from gateway_app.sampling.sample import effective_sampling
from polar.engine import token_api
from polar.engine.client import EngineClient, EngineFault, EngineRefused
from polar.engine.token_api import Rendered
from schemas.sessions import Sampling

STAND_IN: dict[str, Any] = {"role": "user", "content": "."}
REPLY: dict[str, Any] = {"role": "assistant", "content": "."}
BEGINNINGS = 4096
"""Of stand-ins, by tools and options; each is a few ids and a count."""
UNRENDERED = ("stream", "stream_options", "logprobs", "top_logprobs", "max_tokens")
"""Not for the template. What may still be sampled depends on the whole prompt, so ``max_tokens`` is set afterwards."""


class Spliced(msgspec.Struct, frozen=True, kw_only=True):
    """``note``: why a prompt with a history that we served is not exact. ``base``: the turn that it goes on from."""

    rendered: Rendered
    sampling: Sampling
    exact: bool
    note: str | None
    base: Base | None


class NoSplice(Exception):
    """The template cannot be continued here; the message is the reason that the call's event carries."""


class Prompts:
    """``exact``: whether history keeps its sampled ids."""

    def __init__(self, engine: EngineClient, *, exact: bool) -> None:
        self._engine = engine
        self._exact = exact
        self._stand_ins: OrderedDict[bytes, tuple[list[int], list[int]]] = OrderedDict()
        self._end_of_turn: int | None = None
        self._max_model_len: int | None = None

    async def prompt(self, call: Call) -> Spliced:
        """Raises EngineError; Failure for a prompt that is too long."""
        asked = {name: value for name, value in call.chat_request.items() if name not in UNRENDERED}
        note = None
        if self._exact and _has_reply(call):
            try:
                return await self._spliced(call, asked)
            except NoSplice as reason:
                note = str(reason)
        rendered = await token_api.render(self._engine, asked)
        return await self._whole(call, rendered, exact=False, note=note, base=None)

    async def _spliced(self, call: Call, asked: dict[str, Any]) -> Spliced:
        match = call.match
        if match is None:
            raise NoSplice("unknown_history" if call.history.complete else "history_not_in_memory")
        if _has_images(call.request.messages):
            raise NoSplice("images")
        if asked.get("continue_final_message"):
            raise NoSplice("continues_a_reply")
        end = self._end_token(match)
        beginning, usual = await self._stand_in(call.talk.chain[0], asked)
        if end not in usual:
            raise NoSplice("template_ends_turns_otherwise")
        reply, *new = call.request.messages[match.messages - 1 :]
        if not new:
            raise NoSplice("nothing_new")
        try:
            rendered = await token_api.render(self._engine, asked | {"messages": [STAND_IN, _outline(reply), *new]})
        except EngineRefused as refused:
            raise NoSplice("template_refuses_part") from refused
        after = _after_reply(rendered.token_ids, beginning, end)
        self._end_of_turn, turn = end, match.turn
        ids = turn.ids().tolist()
        ids += after if turn.ended_by_token else [end, *after]
        kept_messages = call.talk.equal_messages(turn.messages)
        base = Base(turn, turn.length, kept_messages)
        whole = Rendered(ids, rendered.sampling_params, rendered.body)
        return await self._whole(call, whole, exact=True, note=None, base=base)

    def _end_token(self, match: Match) -> int:
        """The token that ends a turn: the reply's own, or where it was cut off, the one that others ended with."""
        if match.turn.ended_by_token:
            return int(match.turn.tail[-1])
        if self._end_of_turn is None:
            raise NoSplice("end_of_turn_unknown")
        return self._end_of_turn

    async def _stand_in(self, key: bytes, asked: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The ids of the stand-in's first message, with everything that the template puts before it, and of a reply."""
        if key not in self._stand_ins:
            first = asked | {"messages": [STAND_IN], "add_generation_prompt": False}
            both = first | {"messages": [STAND_IN, REPLY]}
            try:
                beginning = (await token_api.render(self._engine, first)).token_ids
                whole = (await token_api.render(self._engine, both)).token_ids
            except EngineRefused as refused:
                raise NoSplice("template_refuses_part") from refused
            self._stand_ins[key] = (beginning, whole[len(beginning) :])
            if len(self._stand_ins) > BEGINNINGS:
                self._stand_ins.popitem(last=False)
        self._stand_ins.move_to_end(key)
        return self._stand_ins[key]

    async def _whole(
        self, call: Call, rendered: Rendered, *, exact: bool, note: str | None, base: Base | None
    ) -> Spliced:
        """With ``max_tokens`` within what the context still has room for."""
        limit = await self._context()
        room = limit - len(rendered.token_ids)
        if room <= 0:
            raise context_overflow(len(rendered.token_ids), limit)
        asked = call.chat_request.get("max_tokens")
        parameters = rendered.sampling_params | {"max_tokens": min(asked or room, room)}
        return Spliced(
            rendered=Rendered(rendered.token_ids, parameters, rendered.body),
            sampling=effective_sampling(parameters),
            exact=exact,
            note=note,
            base=base,
        )

    async def _context(self) -> int:
        if self._max_model_len is None:
            try:
                self._max_model_len = int((await self._engine.models())["data"][0]["max_model_len"])
            except (LookupError, TypeError, ValueError) as error:
                raise EngineFault("/v1/models does not tell max_model_len") from error
        return self._max_model_len


def _has_reply(call: Call) -> bool:
    return any(message.get("role") == "assistant" for message in call.request.messages)


def _has_images(messages: list[dict[str, Any]]) -> bool:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def _outline(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, short: what comes after it may depend on the names of its tool calls, not on what they say."""
    outline = dict(REPLY)
    if calls := reply.get("tool_calls"):
        outline["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": "{}"}} for call in calls
        ]
    return outline


def _after_reply(ids: list[int], beginning: list[int], end: int) -> list[int]:
    """What follows the token that ends the stand-in's reply. Raises NoSplice."""
    if ids[: len(beginning)] != beginning:
        raise NoSplice("template_moves_its_beginning")
    try:
        return ids[ids.index(end, len(beginning)) + 1 :]
    except ValueError:
        raise NoSplice("template_ends_turns_otherwise") from None
