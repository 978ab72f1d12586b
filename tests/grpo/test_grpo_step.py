"""Scores and steps against the plainest way to compute the same, and what a step refuses."""

import math

import numpy as np
import pytest
import torch
from grpo_material import (
    VOCABULARY,
    load,
    make_policy_folder,
    make_trace,
    naive_logprobs,
    random_traces,
    seal,
    whole_ids,
)

import polar.grpo.logprobs as scoring
import polar.grpo.step as stepping
from polar.grpo.batch import train_batch
from polar.grpo.errors import BatchError, NonFiniteStep, PolicyModelError
from polar.grpo.logprobs import micro_batches, score_tokens
from polar.grpo.model import PROBE_TOKENS, prepare_torch, probe, probe_ids
from polar.grpo.step import StepOptions, make_optimizer, train_step
from schemas.packed import unpack_ids, unpack_logprobs, unpack_mask

OPTIONS = StepOptions(
    learning_rate=1e-3, weight_decay=0.0, clip_low=0.2, clip_high=0.28, kl_coefficient=0.0, max_grad_norm=1.0
)


@pytest.fixture(scope="module", autouse=True)
def _deterministic():
    prepare_torch(device="cpu", threads=1, seed=0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_policy_folder(tmp_path_factory.mktemp("policy"))


def batch_of(number, traces):
    return train_batch(seal(number, traces), traces)


def step(folder, batch, *, reference=None, **changes):
    options = StepOptions(**{name: getattr(OPTIONS, name) for name in OPTIONS.__struct_fields__} | changes)
    model = load(folder)
    metrics = train_step(model, make_optimizer(model, options), batch, options, reference)
    return model, metrics


def test_scores_equal_each_sequence_alone_at_its_temperatures(folder):
    model, traces = load(folder), random_traces(1)
    sequences = batch_of(1, traces).sequences
    scores = score_tokens(model, sequences)
    expected = []
    for trace in traces:
        temperature, start = trace.spans[0].temperature, len(unpack_ids(trace.prompt_ids))
        logprobs = naive_logprobs(model, whole_ids(trace), temperature)[start - 1 :]
        expected += logprobs[unpack_mask(trace.loss_mask).astype(bool)].tolist()
    assert np.allclose(scores.logprobs.detach().numpy(), expected, atol=2e-5)
    assert (scores.entropies > 0).all() and (scores.entropies < math.log(VOCABULARY) + 1e-4).all()


def test_logits_in_pieces_give_the_same_scores_and_gradients(folder, monkeypatch):
    sequences = batch_of(1, random_traces(1)).sequences
    gradients = []
    for limit in (scoring.LOGIT_BYTES, 7 * 4 * VOCABULARY):
        monkeypatch.setattr(scoring, "LOGIT_BYTES", limit)
        model = load(folder)
        scores = score_tokens(model, sequences)
        scores.logprobs.sum().backward()
        gradients.append((scores.logprobs.detach(), scores.entropies, model.get_input_embeddings().weight.grad))
    for whole, pieces in zip(*gradients, strict=True):
        assert torch.allclose(whole, pieces, atol=1e-4)


def test_micro_batches_hold_every_sequence_once_within_the_budget():
    sequences = batch_of(1, random_traces(1, groups=4, samples=5)).sequences
    batches = micro_batches(sequences, 200)
    assert sorted(id(sequence) for batch in batches for sequence in batch) == sorted(map(id, sequences))
    assert all(len(batch) * max(map(len, batch)) <= 200 for batch in batches)
    assert len(batches) > 2


def test_a_step_does_not_depend_on_how_it_is_cut_into_micro_batches(folder, monkeypatch):
    batch = batch_of(1, random_traces(1))
    whole, whole_metrics = step(folder, batch, max_grad_norm=1e9)
    monkeypatch.setattr(stepping, "MICRO_BATCH_TOKENS", 1)
    pieces, pieces_metrics = step(folder, batch, max_grad_norm=1e9)
    assert pieces_metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-5)
    assert pieces_metrics["grad_norm"] == pytest.approx(whole_metrics["grad_norm"], rel=1e-4)
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_a_session_weighs_the_same_in_one_trace_or_in_two(folder):
    prompt, first, tool, second = [3, 4], [5, 6, 7], [8, 9], [10, 11]
    bad = make_trace(session_id="bad", group_id="g", reward=0.0, prompt=prompt, turns=[([20, 21], True)])
    one = make_trace(
        session_id="good", group_id="g", reward=1.0, prompt=prompt, turns=[(first, True), (tool, False), (second, True)]
    )
    start = make_trace(session_id="good", group_id="g", reward=1.0, prompt=prompt, turns=[(first, True)])
    rest = make_trace(
        session_id="good", group_id="g", reward=1.0, prompt=prompt + first + tool, turns=[(second, True)], branch=1
    )
    whole, whole_metrics = step(folder, batch_of(1, [one, bad]))
    cut, cut_metrics = step(folder, batch_of(1, [start, rest, bad]))
    assert cut_metrics["sequences"] == whole_metrics["sequences"] + 1
    assert cut_metrics["tokens"] == whole_metrics["tokens"]
    assert cut_metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-6)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_on_policy_the_recomputed_log_probs_are_the_captured_ones(folder):
    batch = batch_of(1, random_traces(1, model=load(folder)))
    _, metrics = step(folder, batch)
    assert metrics["logprob_mismatch"] < 1e-5 and metrics["logprob_mismatch_max"] < 1e-4
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0 and metrics["staleness_mean"] == 0
    assert metrics["on_policy_tokens"] == metrics["tokens"] == batch.trained_tokens


def test_log_probs_of_another_policy_show_as_mismatch(folder, tmp_path):
    other = load(make_policy_folder(tmp_path / "other", seed=8))
    _, metrics = step(folder, batch_of(1, random_traces(1, model=other)))
    assert metrics["logprob_mismatch"] > 0.1 and metrics["clip_fraction"] > 0


def test_tokens_of_older_versions_are_no_mismatch(folder):
    traces = random_traces(1, model=load(folder))
    _, metrics = step(folder, batch_of(3, traces))
    assert metrics["staleness_mean"] == 2 and metrics["on_policy_tokens"] == 0
    assert "logprob_mismatch" not in metrics


def test_a_step_makes_good_sessions_likelier(folder):
    before = load(folder)
    traces = random_traces(1, model=before)
    after, metrics = step(folder, batch_of(1, traces), learning_rate=3e-3)
    gain = {0.0: 0.0, 1.0: 0.0}
    for trace in traces:
        ids = whole_ids(trace)
        gain[trace.reward] += float((naive_logprobs(after, ids) - naive_logprobs(before, ids)).mean())
    assert gain[1.0] > gain[0.0]
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["reward_mean"] == pytest.approx(1 / 3)


def test_the_gradient_is_clipped_and_reported_as_it_was(folder):
    model, metrics = step(folder, batch_of(1, random_traces(1)), max_grad_norm=1e-3)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert norm == pytest.approx(1e-3, rel=1e-2) and metrics["grad_norm"] > 1e-2


def test_learning_rate_0_changes_no_bit(folder):
    model, _ = step(folder, batch_of(1, random_traces(1)), learning_rate=0.0, weight_decay=0.1)
    for a, b in zip(model.parameters(), load(folder).parameters(), strict=True):
        assert torch.equal(a, b)


def test_kl_to_the_reference_is_0_at_the_reference_and_holds_the_policy_back(folder, tmp_path):
    batch = batch_of(1, random_traces(1, model=load(folder)))
    _, plain = step(folder, batch)
    _, same = step(folder, batch, reference=load(folder), kl_coefficient=0.5)
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    other = load(make_policy_folder(tmp_path / "other", seed=8))
    _, held = step(folder, batch, reference=other, kl_coefficient=0.5)
    assert held["kl"] > 0
    assert held["loss"] == pytest.approx(plain["loss"] + 0.5 * held["kl"], abs=1e-4)


def test_a_step_that_is_no_number_changes_nothing(folder):
    model = load(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = math.nan
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteStep, match="batch 1: the loss is nan"):
        train_step(model, make_optimizer(model, OPTIONS), batch_of(1, random_traces(1)), OPTIONS)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, model.parameters(), strict=True))


def test_an_id_outside_the_vocabulary_is_refused(folder):
    traces = [
        make_trace(session_id=name, group_id="g", reward=reward, prompt=[1], turns=[([VOCABULARY], True)])
        for name, reward in (("s", 0.0), ("t", 1.0))
    ]
    with pytest.raises(BatchError, match=f"token id {VOCABULARY}"):
        step(folder, batch_of(1, traces))


def test_the_probe_is_what_the_model_itself_says(folder):
    model = load(folder)
    found = probe(model)
    ids = unpack_ids(found.prompt_ids).tolist()
    assert ids == probe_ids(VOCABULARY) and len(set(ids)) > PROBE_TOKENS // 2 and max(ids) < VOCABULARY
    assert np.allclose(unpack_logprobs(found.logprobs), naive_logprobs(model, ids), atol=1e-5)
    assert found == probe(load(folder))


def test_weights_that_are_no_numbers_have_no_probe(folder):
    model = load(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[probe_ids(VOCABULARY)[3]] = math.nan
    with pytest.raises(PolicyModelError, match="no numbers"):
        probe(model)


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "model.safetensors"])
def test_an_incomplete_model_folder_is_named(tmp_path, missing):
    folder = make_policy_folder(tmp_path / "policy")
    (folder / missing).unlink()
    with pytest.raises(PolicyModelError, match=missing) as caught:
        load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_weights_file_is_named(tmp_path):
    folder = make_policy_folder(tmp_path / "policy")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(PolicyModelError, match="cannot be loaded"):
        load(folder)


def test_an_unknown_device_is_named():
    with pytest.raises(PolicyModelError, match="'abacus'"):
        prepare_torch(device="abacus", threads=1, seed=0)
