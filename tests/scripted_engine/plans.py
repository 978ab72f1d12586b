"""What a test decides for each call: the reply, how fast it comes, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec

from scripted_engine.template import Template
from scripted_engine.tokens import TURN_END, TURN_START, decode, encode

Kind = Literal[
    "status",  # an error instead of a response
    "cut",  # the connection is closed; before any byte where ``after`` is 0
    "stall",  # nothing more comes
    "pause",  # the engine pauses itself, and holds the call until it is resumed
    "error",  # an error event in the stream
    "garbage",  # an event that is no JSON
    "no_finish",  # the stream ends properly, without a finish reason
    "no_ids",  # token_ids is null
    "no_logprobs",  # logprobs is null
    "short_logprobs",  # one log-prob fewer than ids
    "missing_logprob",  # -9999, which vLLM writes for a token whose log-prob it does not have
    "no_versions",  # weight_versions is null
    "wrong_usage",  # one token more than were sent
    "wrong_prompt",  # another prompt than was given
]


class Fault(msgspec.Struct, frozen=True):
    """``after`` so many tokens; ``status`` is that of a refused call; ``delay_s`` comes before the answer."""

    kind: Kind | None = None
    after: int = 0
    status: int = 500
    delay_s: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One reply. Text is what a client reads; ``ids`` (the ending token included) goes before all text.

    ``calls`` are (name, arguments): a dict is written as JSON, a string as it stands, also when it is no JSON.
    ``finish`` "length" leaves the ending token out. ``drift`` 1 or 2 samples other ids than rendering the text gives.
    Times: ``first_s`` before the first token, ``between_s`` between chunks of ``per_chunk`` tokens.
    """

    content: str = ""
    reasoning: str | None = None
    calls: Sequence[tuple[str, dict[str, Any] | str]] = ()
    ids: tuple[int, ...] | None = None
    finish: Literal["stop", "length"] = "stop"
    drift: int = 0
    first_s: float = 0.0
    between_s: float = 0.0
    per_chunk: int = 1
    fault: Fault | None = None

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """What the model would sample if nothing stopped it."""
        if self.ids is not None:
            return self.ids
        calls = [
            (name, args if isinstance(args, str) else json.dumps(args, ensure_ascii=False)) for name, args in self.calls
        ]
        text = Template().reply(self.content, self.reasoning, calls)
        ids = encode(text, self.drift)
        return tuple(ids if self.finish == "length" else [*ids, TURN_END])


class Turn:
    """A call that asks for a reply. ``request`` is its chat request; a generate call has none."""

    def __init__(self, prompt_ids: list[int], endpoint: str, request: dict[str, Any] | None) -> None:
        self.prompt_ids = prompt_ids
        self.endpoint = endpoint
        self.request = request

    @cached_property
    def text(self) -> str:
        """The prompt's text."""
        return decode(self.prompt_ids)

    @cached_property
    def number(self) -> int:
        """How many assistant turns the prompt has: 0 in the first call of a conversation."""
        head = encode("assistant\n")
        starts = [at for at, token in enumerate(self.prompt_ids) if token == TURN_START]
        return sum(self.prompt_ids[at + 1 : at + 1 + len(head)] == head for at in starts) - 1


Script = Callable[[Turn], Plan]


def always(plan: Plan) -> Script:
    """The same reply to every call."""
    return lambda turn: plan


def by_turn(*plans: Plan) -> Script:
    """The n-th reply of a conversation to its n-th call, by the prompt alone; the last one repeats."""
    return lambda turn: plans[min(max(turn.number, 0), len(plans) - 1)]


def in_order(*plans: Plan) -> Script:
    """One reply after the other, whatever is asked; the last one repeats."""
    left = list(plans)
    return lambda turn: left.pop(0) if len(left) > 1 else left[0]


def by_last_word(plans: dict[str, Plan]) -> Script:
    """The plan of the word that ends the last message; of the empty word for any other."""
    tail = 16 + max(len(word) for word in plans)

    def choose(turn: Turn) -> Plan:
        before, _, _ = decode(turn.prompt_ids[-tail:]).rpartition("<|im_end|>")
        return plans.get(before.rpartition(" ")[2]) or plans[""]

    return choose
