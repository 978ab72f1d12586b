"""Builders: from the calls of a session to its training sequences.

Each trained call's tokens are trained (mask 1) in exactly one sequence, whichever builder made them. Along a sequence,
ids equal what the engine saw and sampled: nothing is tokenised again.

A worked example of ``prefix_merging``. Ids in brackets are sampled:

    call 1: 1 2 [3 4]                        branch 0: 1 2 [3 4] 5 [6 7]   mask over 3 4 5 6 7: 1 1 0 1 1
    call 2: 1 2 3 4 5 [6 7]
    call 3: 1 2 3 4 8 [9]                    branch 1: 1 2 3 4 8 [9]       mask over 3 4 8 9:   0 0 0 1

Call 3 goes on from call 1 too, but otherwise than call 2 did: a sub-agent, or a history that was edited. The tokens
3 4 are context there, since branch 0 trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.trajectories.calls import Call, is_prefix
from schemas.traces import SampledSpan


class Sequenced(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One training sequence: prompt ids (p,), then response ids, loss mask and log-probs of shape (r,).

    Log-probs are 0 where the mask is 0. ``calls`` are those along it, the first one's prompt being ``prompt_ids``.
    """

    calls: list[Call]
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    spans: list[SampledSpan]
    notes: list[str]


Builder = Callable[[Sequence[Call]], list[Sequenced]]


def per_request(calls: Sequence[Call]) -> list[Sequenced]:
    """One sequence a trained call, by call number."""
    return [_sequence([call], {call.call_id}, []) for call in _trained(calls)]


def prefix_merging(calls: Sequence[Call]) -> list[Sequenced]:
    """One sequence a path through the tree of calls.

    A call's parent is the deepest call whose prompt and response ids are a prefix of its prompt; of equals, the one
    that nothing goes on from yet, then the lowest number. Paths run from a root to a leaf, in order of call numbers
    (depth first), and the first path that holds a call trains it.
    """
    trained = _trained(calls)
    children = _tree(trained)
    done: set[str] = set()
    sequences: list[Sequenced] = []
    for path in _paths(children):
        fresh = [call for call in path if call.call_id not in done]
        notes = [_why_split(fresh[0], [sequence.calls for sequence in sequences])] if sequences else []
        sequences.append(_sequence(path, {call.call_id for call in fresh}, notes))
        done.update(call.call_id for call in fresh)
    return sequences


BUILDERS: dict[str, Builder] = {"per_request": per_request, "prefix_merging": prefix_merging}


def _trained(calls: Sequence[Call]) -> list[Call]:
    return sorted((call for call in calls if call.trained), key=lambda call: (call.number, call.call_id))


def _tree(calls: list[Call]) -> dict[str | None, list[Call]]:
    """Children by parent's call id (None: the roots), each list in the order of ``calls``."""
    deepest_first = sorted(((call.ids, call) for call in calls), key=lambda pair: -len(pair[0]))
    children: dict[str | None, list[Call]] = {None: []}
    for call in calls:
        parent: str | None = None
        depth = 0
        for ids, other in deepest_first:
            if len(ids) < depth:
                break
            if not is_prefix(ids, call.prompt_ids):
                continue
            if parent is None or (parent in children and other.call_id not in children):
                parent, depth = other.call_id, len(ids)
        children.setdefault(parent, []).append(call)
    return children


def _paths(children: dict[str | None, list[Call]]) -> list[list[Call]]:
    """Every path from a root to a leaf, depth first."""
    paths: list[list[Call]] = []
    stack = [[root] for root in reversed(children[None])]
    while stack:
        path = stack.pop()
        nexts = children.get(path[-1].call_id, [])
        if not nexts:
            paths.append(path)
        stack.extend([*path, child] for child in reversed(nexts))
    return paths


def _sequence(path: list[Call], fresh: set[str], notes: list[str]) -> Sequenced:
    """``path``'s last call whole, with mask 1 over what the ``fresh`` calls sampled."""
    leaf = path[-1]
    prompt_ids = path[0].prompt_ids
    response_ids = leaf.ids[len(prompt_ids) :]
    mask = np.zeros(len(response_ids), np.uint8)
    logprobs = np.zeros(len(response_ids), np.float32)
    spans: list[SampledSpan] = []
    for call in path:
        start = len(call.prompt_ids) - len(prompt_ids)
        if call.call_id in fresh:
            mask[start : start + len(call.response_ids)] = 1
            logprobs[start : start + len(call.response_ids)] = call.logprobs
        spans.extend(
            SampledSpan(
                start=start + span.start,
                end=start + span.end,
                version=span.version,
                call_id=call.call_id,
                temperature=call.sampling.temperature,
            )
            for span in call.versions
        )
    return Sequenced(
        calls=path,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=mask,
        logprobs=logprobs,
        spans=spans,
        notes=notes,
    )


def _why_split(call: Call, paths: list[list[Call]]) -> str:
    """Where ``call``, the first that is new in its branch, leaves the earlier path that it shares most with."""
    ids = call.ids
    shares = [_common_prefix(ids, path[-1].ids) for path in paths]
    shared = max(shares)
    path = paths[shares.index(shared)]
    begins = f"branch {len(paths)} begins at call {call.number}"
    other = next((c for c in path if len(c.ids) > shared), path[-1])
    if shared == len(other.ids) or shared == len(ids):
        return f"{begins}: it repeats the first {shared} ids of call {other.number}"
    part = "prompt" if shared < len(other.prompt_ids) else "response"
    return (
        f"{begins}: it differs from the {part} of call {other.number} first at position {shared}"
        f" ({other.ids[shared]} there, {ids[shared]} here)"
    )


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
