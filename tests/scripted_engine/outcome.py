"""Where a reply ends: its own end, a stop string, a stop token, or the most tokens that were asked for."""

from __future__ import annotations

from typing import Any

from scripted_engine.answers import Outcome
from scripted_engine.plans import Plan
from scripted_engine.tokens import TURN_END, Decoder


def outcome(plan: Plan, sampling: dict[str, Any], room: int) -> Outcome:
    """``room`` is what the context leaves for output tokens."""
    most = min(sampling.get("max_tokens") or room, room)
    ids, finish, reason = plan.sampled, plan.finish, None
    if not sampling.get("ignore_eos") and TURN_END in ids:
        ids, finish = ids[: ids.index(TURN_END) + 1], "stop"
    enders = set(sampling.get("stop_token_ids") or ())
    at = next((at for at, token in enumerate(ids) if token in enders), None)
    if at is not None:
        ids, finish, reason = ids[: at + 1], "stop", ids[at]
    if stops := stop_strings(sampling):
        count, found = _stopped(ids, stops)
        if found is not None:
            ids, finish, reason = ids[:count], "stop", found
    if len(ids) > most:
        ids, finish, reason = ids[:most], "length", None
    return Outcome(ids or (TURN_END,), finish, reason, plan.per_chunk)


def stop_strings(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _stopped(ids: tuple[int, ...], stops: tuple[str, ...]) -> tuple[int, str | None]:
    decoder, text = Decoder(control=False), ""
    for count, token in enumerate(ids, 1):
        text += decoder.push([token])
        if found := next((stop for stop in stops if stop in text), None):
            return count, found
    return len(ids), None
