"""From the records of ``polar.batches`` to what one optimizer step reads.

Batches come in order and whole: number k follows k−1, its traces are 0, 1, …, n−1, and the seal agrees with them.
Anything else is a BatchError, never a guess.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.grpo.advantages import group_advantages
from polar.grpo.errors import BatchError
from schemas.batches import BatchRecord, BatchSealed, BatchTrace, GroupExcluded
from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask
from schemas.traces import Trace


class TrainSequence(msgspec.Struct, frozen=True, eq=False):
    """One trace as the step reads it: ``length`` ids, of which n are trained.

    ``ids`` int64 (length,), prompt then response, cut after the last trained token. ``positions`` int64 (n,), rising:
    where in ``ids`` each trained token stands, at least 1. ``temperatures`` and ``sampled_logprobs`` (nats) float32
    (n,); ``versions`` int64 (n,), the weights that sampled each token. ``advantage`` is the session's.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    sampled_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantage: float

    def __len__(self) -> int:
        return len(self.ids)


class TrainBatch(msgspec.Struct, frozen=True, eq=False):
    """Batch ``number``: its sequences with a trained token, and the reward of every session of its groups."""

    number: int
    sequences: list[TrainSequence]
    rewards: list[float]

    @property
    def trained_tokens(self) -> int:
        return sum(len(sequence.positions) for sequence in self.sequences)


class BatchAssembly:
    """Collects the records of one policy, in the order of the topic, until a seal completes a batch."""

    def __init__(self, policy: str, next_number: int) -> None:
        self._policy = policy
        self._next_number = next_number
        self._traces: list[BatchTrace] = []

    def add(self, record: BatchRecord) -> TrainBatch | None:
        """The batch that ``record`` completes, if any. Raises BatchError for a gap, a repeat or a seal that differs."""
        if record.policy != self._policy or isinstance(record, GroupExcluded):
            return None
        if record.batch != self._next_number:
            raise BatchError(
                f"polar.batches: batch {record.batch} came where batch {self._next_number} of policy "
                f"{self._policy!r} was due; does the checkpoint folder belong to this broker's data?"
            )
        if isinstance(record, BatchTrace):
            if record.index != len(self._traces):
                raise BatchError(f"batch {record.batch}: trace {record.index} came where {len(self._traces)} was due")
            self._traces.append(record)
            return None
        batch = train_batch(record, [item.trace for item in self._traces])
        self._traces = []
        self._next_number += 1
        return batch


def train_batch(seal: BatchSealed, traces: list[Trace]) -> TrainBatch:
    """Batch ``seal.batch`` of ``traces``. Raises BatchError where the two disagree, or a token would count twice."""
    where = f"batch {seal.batch}"
    trained_tokens = sum(trace.trained_tokens for trace in traces)
    if (len(traces), trained_tokens) != (seal.traces, seal.trained_tokens):
        raise BatchError(
            f"{where}: the seal names {seal.traces} traces with {seal.trained_tokens} trained tokens, "
            f"but {len(traces)} with {trained_tokens} came"
        )
    if not trained_tokens:
        raise BatchError(f"{where}: no trained token")
    _check_trained_once(where, traces)
    advantages = _session_advantages(where, seal)
    sequences = []
    for trace in traces:
        if trace.session_id not in advantages:
            raise BatchError(f"{where}: trace {trace.trace_id} is of session {trace.session_id}, not in the seal")
        if trace.trained_tokens:
            sequences.append(_sequence(where, seal.batch, trace, advantages[trace.session_id]))
    rewards = [session.reward for group in seal.groups for session in group.sessions]
    return TrainBatch(seal.batch, sequences, rewards)


def _check_trained_once(where: str, traces: list[Trace]) -> None:
    trained_in: dict[str, str] = {}
    for trace in traces:
        mask = unpack_mask(trace.loss_mask)
        for call_id in {span.call_id for span in trace.spans if mask[span.start : span.end].any()}:
            if trained_in.setdefault(call_id, trace.trace_id) != trace.trace_id:
                raise BatchError(f"{where}: call {call_id} is trained in {trained_in[call_id]} and {trace.trace_id}")


def _session_advantages(where: str, seal: BatchSealed) -> dict[str, float]:
    advantages: dict[str, float] = {}
    for group in seal.groups:
        try:
            values = group_advantages([session.reward for session in group.sessions])
        except ValueError as error:
            raise BatchError(f"{where}, group {group.group_id}: {error}") from None
        for session, value in zip(group.sessions, values, strict=True):
            if session.session_id in advantages:
                raise BatchError(f"{where}: session {session.session_id} is named twice")
            advantages[session.session_id] = value
    return advantages


def _sequence(where: str, number: int, trace: Trace, advantage: float) -> TrainSequence:
    prompt, response = unpack_ids(trace.prompt_ids), unpack_ids(trace.response_ids)
    trained = np.flatnonzero(unpack_mask(trace.loss_mask))
    temperatures = np.ones(len(response), np.float32)
    versions = np.zeros(len(response), np.int64)
    for span in trace.spans:
        temperatures[span.start : span.end] = span.temperature
        versions[span.start : span.end] = span.version
    if not len(prompt) and trained[0] == 0:
        raise BatchError(f"{where}: trace {trace.trace_id} trains its first token, which has no context")
    if not (temperatures[trained] > 0).all():
        raise BatchError(f"{where}: trace {trace.trace_id} was sampled at a temperature that is not above 0")
    if versions[trained].max() >= number:
        raise BatchError(
            f"{where}: trace {trace.trace_id} was sampled by version {versions[trained].max()}, not yet made"
        )
    end = trained[-1] + 1
    return TrainSequence(
        ids=np.concatenate([prompt, response[:end]]).astype(np.int64),
        positions=len(prompt) + trained,
        temperatures=temperatures[trained],
        sampled_logprobs=unpack_logprobs(trace.logprobs)[trained],
        versions=versions[trained],
        advantage=advantage,
    )
