"""One optimizer step from one batch, and what is measured on the way.

What is left out of GRPO on purpose: a second epoch over a batch (so the old policy is always the one that sampled),
value functions, learning-rate schedules, and KL to the sampling policy.
"""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from polar.grpo.batch import TrainBatch, TrainSequence
from polar.grpo.errors import BatchError, NonFiniteStep
from polar.grpo.logprobs import MICRO_BATCH_TOKENS, TokenScores, micro_batches, score_tokens
from polar.grpo.loss import clipped, clipped_losses, kl_estimates, log_ratio
from polar.grpo.model import vocabulary

BETAS = (0.9, 0.98)
"""The second moment forgets in about 50 steps: runs are short, and early gradients are not like late ones."""


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a step is told. Each is the setting of that name in ``polar.settings``."""

    learning_rate: float
    weight_decay: float
    clip_low: float
    clip_high: float
    kl_coefficient: float
    max_grad_norm: float


def make_optimizer(model: Any, options: StepOptions) -> torch.optim.AdamW:
    """AdamW with a constant learning rate. Weight decay spares what has one dimension (norms, biases)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=options.learning_rate, betas=BETAS)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: TrainBatch, options: StepOptions, reference: Any | None = None
) -> dict[str, float]:
    """Moves ``model`` by one step, from version ``batch.number`` − 1 to ``batch.number``, and returns finite metrics.

    ``reference`` is the model of version 0, needed when the KL coefficient is above 0.

    Metrics, as means over the trained tokens: loss, kl (k3, with a reference only), entropy (nats), ratio_mean,
    clip_fraction, staleness_mean (steps). Others: grad_norm (before clipping), reward_mean and reward_std (over
    sessions), tokens (trained), fed_tokens, sequences, sessions, seconds. Where the weights of this very version
    sampled some tokens (on_policy_tokens): logprob_mismatch and logprob_mismatch_max, |recomputed − captured| in nats
    over those.

    Raises NonFiniteStep before anything is changed, and BatchError for an id that the model does not have.
    """
    started = time.monotonic()
    if (largest := max(int(sequence.ids.max()) for sequence in batch.sequences)) >= vocabulary(model):
        raise BatchError(f"batch {batch.number}: token id {largest}, but the model knows {vocabulary(model)} ids")
    sums = _Sums(batch, options)
    optimizer.zero_grad(set_to_none=True)
    for sequences in micro_batches(batch.sequences, MICRO_BATCH_TOKENS):
        loss = sums.add(model, reference, sequences) / batch.trained_tokens
        if not math.isfinite(float(loss.detach())):
            raise NonFiniteStep(f"batch {batch.number}: the loss is {float(loss.detach())}; no weights were changed")
        loss.backward()
    grad_norm = float(clip_grad_norm_(model.parameters(), options.max_grad_norm))
    if not math.isfinite(grad_norm):
        raise NonFiniteStep(f"batch {batch.number}: the gradient's norm is {grad_norm}; no weights were changed")
    optimizer.step()
    return sums.metrics() | {"grad_norm": grad_norm, "seconds": time.monotonic() - started}


class _Sums:
    """Sums over the trained tokens of a batch, gathered from one micro-batch after the other."""

    def __init__(self, batch: TrainBatch, options: StepOptions) -> None:
        self._batch = batch
        self._options = options
        self._totals: dict[str, float] = {}
        self._worst_mismatch = 0.0

    def add(self, model: Any, reference: Any | None, sequences: list[TrainSequence]) -> Tensor:
        """The sum of these sequences' token losses, a scalar with gradient."""
        clip = {"clip_low": self._options.clip_low, "clip_high": self._options.clip_high}
        scores = score_tokens(model, sequences)
        device = scores.logprobs.device
        sampled = torch.from_numpy(np.concatenate([s.sampled_logprobs for s in sequences])).to(device)
        counts = torch.tensor([len(s.positions) for s in sequences], device=device)
        advantages = torch.tensor([s.advantage for s in sequences], device=device).repeat_interleave(counts)
        losses = clipped_losses(scores.logprobs, sampled, advantages, **clip)
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = score_tokens(reference, sequences).logprobs
            kl = kl_estimates(scores.logprobs, reference_logprobs)
            losses = losses + self._options.kl_coefficient * kl
            self._count(kl=kl)
        ratio = log_ratio(scores.logprobs, sampled).detach().exp()
        self._count(loss=losses, ratio_mean=ratio, clip_fraction=clipped(ratio, advantages, **clip))
        self._measure(scores, sampled, sequences)
        return losses.sum()

    def metrics(self) -> dict[str, float]:
        """Means over the batch's trained tokens, and what is known of the batch itself."""
        batch, totals = self._batch, dict(self._totals)
        on_policy, mismatch = totals.pop("on_policy"), totals.pop("mismatch")
        metrics = {name: total / batch.trained_tokens for name, total in totals.items()}
        if on_policy:
            metrics["logprob_mismatch"] = mismatch / on_policy
            metrics["logprob_mismatch_max"] = self._worst_mismatch
        return metrics | {
            "on_policy_tokens": on_policy,
            "reward_mean": float(np.mean(batch.rewards)),
            "reward_std": float(np.std(batch.rewards, ddof=1)),
            "tokens": float(batch.trained_tokens),
            "fed_tokens": float(sum(len(sequence) - 1 for sequence in batch.sequences)),
            "sequences": float(len(batch.sequences)),
            "sessions": float(len(batch.rewards)),
        }

    @torch.no_grad()
    def _measure(self, scores: TokenScores, sampled: Tensor, sequences: list[TrainSequence]) -> None:
        version = self._batch.number - 1
        versions = torch.from_numpy(np.concatenate([s.versions for s in sequences])).to(sampled.device)
        mismatch = (scores.logprobs - sampled).abs()[versions == version]
        if mismatch.numel():
            self._worst_mismatch = max(self._worst_mismatch, float(mismatch.max()))
        self._count(
            entropy=scores.entropies,
            staleness_mean=version - versions,
            mismatch=mismatch,
            on_policy=versions == version,
        )

    def _count(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + float(value.detach().double().sum())
