"""Calls made whole: events carry what is new after a base call, a ``Call`` has everything.

A worked example. Call A has prompt [1 2 3] and response [4 5]. Call B says base A, kept_ids 5, prompt_ids [6]:
its prompt is [1 2 3 4 5 6].
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.trajectories.story import CallStory, Story
from schemas.packed import IDS, unpack_ids, unpack_logprobs
from schemas.sessions import CallCompleted, CallStarted, Sampling, VersionSpan

LOWEST_LOGPROB = -1000.0
"""No sampled token has a probability of e⁻¹⁰⁰⁰: engines write −9999 for what they could not compute."""


MAX_WHOLE_IDS = 64 * 2**20
"""Of a session's calls together, each with its whole prompt: about 800 MB while its traces are made."""


class TooLarge(ValueError):
    """A session whose calls have more than ``MAX_WHOLE_IDS`` ids."""


class BrokenCall(ValueError):
    """A call that cannot be made whole, or whose log-probs are no log-probs. The message names the call."""


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One call with its whole prompt.

    ``prompt_ids`` is int32 of shape (p,), ``response_ids`` int32 (r,), ``logprobs`` float32 (r,) in nats; the last two
    are empty and ``finish_reason`` is None where the call has not completed.
    """

    call_id: str
    number: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: list[VersionSpan]
    sampling: Sampling
    auxiliary: str | None
    finish_reason: str | None
    delivered: bool

    @property
    def ids(self) -> NDArray[np.int32]:
        """Prompt, then response: shape (p + r,)."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def trained(self) -> bool:
        """The harness received it, whole, as a turn of the agent."""
        whole = self.response_ids.size > 0 and self.finish_reason != "abort"
        return self.delivered and self.auxiliary is None and whole


def whole_calls(story: Story) -> list[Call]:
    """Every started call of the story, by number. ``delivered`` is told or inferred.

    A completed call whose delivery was never told counts as delivered when the prompt of a later call goes on from it,
    unless that prompt's tokens are those of another delivered call: an agent that asked again may be given the same
    sample, which is trained once. Of such calls one that was told wins, then the last.

    Raises BrokenCall when a call's start or base is missing, or a base is shorter than what is kept of it; TooLarge
    before anything is made whole.
    """
    if (whole_ids := sum(map(_whole_ids, story.calls.values()))) > MAX_WHOLE_IDS:
        raise TooLarge(f"its calls have {whole_ids} ids with their whole prompts, more than {MAX_WHOLE_IDS}")
    for call_id, link in story.calls.items():
        if link.started is None:
            raise BrokenCall(f"call {call_id}: its end is known, its start is not")
    calls: dict[str, Call] = {}
    for started in story.in_order():
        for link in _chain(story, started, calls):
            assert link.started is not None
            calls[link.started.call_id] = _whole(link, calls)
    ordered = [calls[c.started.call_id] for c in story.in_order() if c.started is not None]
    delivered = _delivered(story, ordered)
    return [msgspec.structs.replace(call, delivered=call.call_id in delivered) for call in ordered]


def check_logprobs(call: Call) -> None:
    """Raises BrokenCall unless every log-prob is a number between LOWEST_LOGPROB and 0 (+1e-4)."""
    wrong = ~((call.logprobs <= 1e-4) & (call.logprobs >= LOWEST_LOGPROB))
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise BrokenCall(f"call {call.number}: token {where} has log-prob {call.logprobs[where]}")


def _prompt(link: CallStory) -> CallStarted | CallCompleted | None:
    """The event that tells the prompt: the call's start, or its end where the engine told it only then."""
    if link.started is not None and link.started.prompt_ids is None:
        return link.completed
    return link.started


def _whole_ids(link: CallStory) -> int:
    """How many ids the call has with its whole prompt, if its base is as long as it says."""
    told = _prompt(link)
    prompt = 0 if told is None else max(0, told.kept_ids) + len(told.prompt_ids or b"") // IDS.itemsize
    return prompt + (0 if link.completed is None else len(link.completed.response_ids) // IDS.itemsize)


def _chain(story: Story, call: CallStory, done: dict[str, Call]) -> list[CallStory]:
    """``call`` and the bases it needs that are not done yet, the deepest base first."""
    chain: list[CallStory] = []
    seen: set[str] = set()
    link = call
    while link.started is not None and link.started.call_id not in done:
        if link.started.call_id in seen:
            raise BrokenCall(f"call {link.started.number}: its base calls form a circle")
        seen.add(link.started.call_id)
        chain.append(link)
        told = _prompt(link)
        base = None if told is None else told.base_call_id
        if base is None:
            break
        if base not in story.calls or story.calls[base].started is None:
            raise BrokenCall(f"call {link.started.number}: its base call {base} is not in the session's story")
        link = story.calls[base]
    return chain[::-1]


def _whole(link: CallStory, calls: dict[str, Call]) -> Call:
    started, completed = link.started, link.completed
    assert started is not None
    told, empty = _prompt(link), np.empty(0, np.int32)
    if completed is not None and (told is None or told.prompt_ids is None):
        raise BrokenCall(f"call {started.number}: neither its start nor its end tells its prompt")
    prompt_ids = empty if told is None or told.prompt_ids is None else unpack_ids(told.prompt_ids)
    if told is not None and told.base_call_id is not None:
        prompt_ids = np.concatenate([_kept(started.number, told, calls[told.base_call_id]), prompt_ids])
    return Call(
        call_id=started.call_id,
        number=started.number,
        prompt_ids=prompt_ids,
        response_ids=empty if completed is None else unpack_ids(completed.response_ids),
        logprobs=empty.astype(np.float32) if completed is None else unpack_logprobs(completed.logprobs),
        versions=[] if completed is None else completed.weight_versions,
        sampling=started.sampling,
        auxiliary=started.auxiliary,
        finish_reason=None if completed is None else completed.finish_reason,
        delivered=False,
    )


def _kept(number: int, told: CallStarted | CallCompleted, base: Call) -> NDArray[np.int32]:
    ids, kept = base.ids, told.kept_ids
    if not 0 <= kept <= len(ids):
        raise BrokenCall(f"call {number}: it keeps {kept} of its base, which has {len(ids)}")
    return ids[:kept]


def _delivered(story: Story, calls: list[Call]) -> dict[str, Call]:
    """Those of ``calls`` that were delivered, by id."""
    delivered: dict[str, Call] = {}
    untold: list[int] = []
    for place, call in enumerate(calls):
        link = story.calls[call.call_id]
        if link.completed is None:
            continue
        if link.delivery is None:
            untold.append(place)
        elif link.delivery.delivered:
            delivered[call.call_id] = call
    for place in reversed(untold):
        if any(_went_on(calls[place], later, delivered) for later in calls[place + 1 :]):
            delivered[calls[place].call_id] = calls[place]
    return delivered


def _went_on(call: Call, later: Call, delivered: dict[str, Call]) -> bool:
    """Whether ``later`` holds what ``call`` sampled, and nothing of it was sampled by a ``delivered`` call there."""
    prompt = later.prompt_ids
    return is_prefix(call.ids, prompt) and not any(
        _overlap(call, other) and is_prefix(other.ids, prompt) for other in delivered.values()
    )


def _overlap(a: Call, b: Call) -> bool:
    """Whether both sampled a token at the same position."""
    begins = max(len(a.prompt_ids), len(b.prompt_ids))
    return begins < min(len(a.prompt_ids) + len(a.response_ids), len(b.prompt_ids) + len(b.response_ids))


def is_prefix(ids: NDArray[np.int32], of: NDArray[np.int32]) -> bool:
    """Whether ``of`` begins with all of ``ids``."""
    n = len(ids)
    return n <= len(of) and (n == 0 or (ids[-1] == of[n - 1] and bool(np.array_equal(ids, of[:n]))))
