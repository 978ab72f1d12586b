"""Advantages, losses, gradients and KL against values that verl and TRL computed (golden_grpo.json says which)."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar.grpo.advantages import group_advantages
from polar.grpo.loss import clipped, clipped_losses, kl_estimates

GOLDEN = json.loads((Path(__file__).parent / "golden_grpo.json").read_text())
MASK = torch.tensor(GOLDEN["mask"], dtype=torch.bool)


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name])


def golden_advantages() -> list[float]:
    rewards, groups = GOLDEN["rewards"], GOLDEN["group_index"]
    return [
        a
        for g in sorted(set(groups))
        for a in group_advantages([r for r, i in zip(rewards, groups, strict=True) if i == g])
    ]


def golden_token_losses(golden: dict) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = tensor("logprobs").requires_grad_()
    advantages = torch.tensor(golden_advantages())[:, None].expand_as(logprobs)
    clip = {"clip_low": golden["clip_low"], "clip_high": golden["clip_high"]}
    return logprobs, clipped_losses(logprobs, tensor("old_logprobs"), advantages, **clip)


def test_advantages_equal_verl():
    assert golden_advantages() == pytest.approx(GOLDEN["advantages_std"]["value"], abs=1e-6)


def test_token_mean_loss_and_gradient_equal_verl_and_trl():
    golden = GOLDEN["losses"]["dapo"]
    logprobs, losses = golden_token_losses(golden)
    loss = losses[MASK].sum() / MASK.sum()
    loss.backward()
    assert loss.item() == pytest.approx(golden["verl"], abs=1e-6)
    assert loss.item() == pytest.approx(golden["trl"], abs=1e-6)
    assert torch.allclose(logprobs.grad, torch.tensor(golden["grad"]), atol=1e-6)


def test_token_losses_equal_grpos_under_its_own_mean():
    golden = GOLDEN["losses"]["grpo"]
    logprobs, losses = golden_token_losses(golden)
    loss = ((losses * MASK).sum(1) / MASK.sum(1)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(golden["verl"], abs=1e-6)
    assert torch.allclose(logprobs.grad, torch.tensor(golden["grad"]), atol=1e-6)


def test_clipped_tokens_are_those_without_a_gradient():
    golden = GOLDEN["losses"]["dapo"]
    logprobs, losses = golden_token_losses(golden)
    losses[MASK].sum().backward()
    advantages = torch.tensor(golden_advantages())[:, None].expand_as(logprobs)
    ratio = (logprobs - tensor("old_logprobs")).detach().exp()
    found = clipped(ratio, advantages, clip_low=golden["clip_low"], clip_high=golden["clip_high"])
    assert torch.equal(found[MASK], logprobs.grad[MASK] == 0)
    assert found[MASK].any() and not found[MASK].all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_equal_verl(kind):
    estimates = kl_estimates(tensor("logprobs"), tensor("ref_logprobs"), kind)
    assert torch.allclose(estimates, torch.tensor(GOLDEN["kl"][kind]), atol=1e-6)


def test_extreme_log_probs_stay_finite():
    logprobs = torch.tensor([-1e4, -1e-4, -1e4], requires_grad=True)
    other = torch.tensor([-1e-4, -1e4, -1e4])
    losses = clipped_losses(logprobs, other, torch.tensor([-1.0, -1.0, 0.0]), clip_low=0.2, clip_high=0.28)
    (losses + kl_estimates(logprobs, other)).sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16).filter(lambda r: max(r) - min(r) > 1e-3))
def test_advantages_are_centred_and_ordered_like_the_rewards(rewards):
    advantages = group_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in pairwise(order))


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.0, math.nan], [0.0, math.inf]])
def test_a_group_that_teaches_nothing_is_refused(rewards):
    with pytest.raises(ValueError):
        group_advantages(rewards)
