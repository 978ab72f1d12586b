"""The loss of one batch, token by token: the clipped ratio (PPO; DAPO's clip-higher, arXiv 2503.14476) and a KL term.

Weighting. Over all trained tokens t of the batch's sessions s, with N the number of those tokens,

    L = 1/N · Σ_s Σ_{t of s} −min(r_t·A_s, clip(r_t, 1−low, 1+high)·A_s)  +  β/N · Σ_s Σ_{t of s} k3_t

that is DAPO's token-mean with one global N for the whole optimizer step, however it is cut into micro-batches. There is
no mean per trace anywhere, and each sampled token is trained in exactly one trace (``batch.py`` refuses a call that two
traces train). So a session's weight is n_s/N, where n_s counts its sampled tokens: cutting the session into more traces
changes neither n_s nor N. Long sessions weigh more than short ones, as in DAPO and prime-rl; many-trace ones do not.

r_t = exp(logπ_θ − logπ_sampled), both at the temperature of the token. logπ_sampled is what the engine reported when it
sampled, so a token of an older weight version gets the ratio to the policy that really made it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is far outside any clip range, and still finite when multiplied: an overflow would turn 0·inf into NaN."""
MAX_KL = 10.0
"""Per token, as verl does: k3 grows exponentially where the reference finds a token likely and the policy does not."""


def log_ratio(logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """logπ_θ − logπ_sampled in nats, shape (n,), kept where exp is finite."""
    return (logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_losses(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """−min(r·A, clip(r, 1−low, 1+high)·A) of each trained token, shape (n,); all arguments have shape (n,)."""
    ratio = log_ratio(logprobs, sampled_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Whether the clip took a token's gradient away, bool of shape (n,)."""
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """An estimate of KL(π_θ ‖ π_ref) from each sampled token, in nats, shape (n,).

    With d = logπ_θ − logπ_ref: k1 = d, k2 = d²/2, k3 = exp(−d) + d − 1 (http://joschu.net/blog/kl-approx.html).
    k3 is never negative and its variance is low; the trainer uses it.
    """
    difference = log_ratio(logprobs, reference_logprobs)
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return ((-difference).exp() + difference - 1).clamp(-MAX_KL, MAX_KL)
