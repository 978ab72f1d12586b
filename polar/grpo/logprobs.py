"""Log-probs of trained tokens under the policy, in float32, at the temperature each was sampled with.

Sequences are sorted by length and padded on the right into micro-batches of a token budget. Attention is causal and the
padding stands behind every real token, so no mask is needed. Logits are made only where a trained token is predicted,
and in pieces, because n × vocabulary floats are the largest array of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polar.grpo.batch import TrainSequence

MICRO_BATCH_TOKENS = 4096
"""On a CPU more is no faster, and takes memory."""
LOGIT_BYTES = 128 << 20
"""Logits that are held at once. Beyond it they are made in pieces, and made again in the backward pass."""


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """Of n trained tokens: ``logprobs`` (n,) with gradient, and ``entropies`` (n,) of their distributions, in nats."""

    logprobs: Tensor
    entropies: Tensor


def micro_batches(sequences: Sequence[TrainSequence], token_budget: int) -> list[list[TrainSequence]]:
    """All sequences, longest first, in runs whose padded size is at most ``token_budget`` (or one sequence)."""
    batches: list[list[TrainSequence]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= token_budget:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


def score_tokens(model: Any, sequences: Sequence[TrainSequence]) -> TokenScores:
    """Scores of all trained tokens of one micro-batch, sequence after sequence, by a causal LM of transformers.

    The last token of a sequence predicts nothing that is trained, so it is not fed.
    """
    device = next(model.parameters()).device
    width = max(len(sequence) for sequence in sequences) - 1
    inputs = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(inputs, sequences, strict=True):
        row[: len(sequence) - 1] = torch.from_numpy(sequence.ids[:-1])
    predicting = np.concatenate([row * width + sequence.positions - 1 for row, sequence in enumerate(sequences)])
    targets = np.concatenate([sequence.ids[sequence.positions] for sequence in sequences])
    temperatures = np.concatenate([sequence.temperatures for sequence in sequences])
    hidden = model.base_model(input_ids=inputs.to(device), use_cache=False).last_hidden_state
    return score_hidden(
        model.get_output_embeddings(),
        hidden.flatten(0, 1)[torch.from_numpy(predicting).to(device)],
        torch.from_numpy(targets).to(device),
        torch.from_numpy(temperatures).to(device),
    )


def score_hidden(head: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> TokenScores:
    """Scores of ``targets`` (n,) int64 from hidden states (n, width) and temperatures (n,)."""
    rows = max(1, LOGIT_BYTES // (4 * head.weight.shape[0]))
    if len(targets) <= rows:
        return TokenScores(*_score(head, hidden, targets, temperatures))
    pieces = [
        checkpoint(_score, head, *piece, use_reentrant=False)
        for piece in zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


def _score(head: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (head(hidden).float() / temperatures[:, None]).log_softmax(-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies
