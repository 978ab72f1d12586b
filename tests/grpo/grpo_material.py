"""A random Qwen3 policy folder, and batches with random sequences, for the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from polar.grpo.model import load_policy
from polar.settings import Settings
from schemas.batches import BatchGroup, BatchSealed, BatchTrace, SessionReward
from schemas.ids import derived_id
from schemas.packed import pack_ids, pack_logprobs, pack_mask, unpack_ids
from schemas.traces import SampledSpan, Trace

VOCABULARY = 96


def make_policy_folder(folder: Path, *, tied: bool = True, seed: int = 7, **sizes: int) -> Path:
    """A Hugging Face folder with random float32 weights and a tokenizer; about 10,000 parameters unless told."""
    given = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY} | sizes
    config = Qwen3Config(
        **given,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(given["vocab_size"])}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def naive_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """log-prob of ids[1:], one unpadded sequence, by the model's own logits: float64 softmax, shape (n−1,)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def make_trace(
    *,
    session_id: str,
    group_id: str,
    reward: float,
    prompt: list[int],
    turns: list[tuple[list[int], bool]],
    version: int = 0,
    temperature: float = 1.0,
    model: Any = None,
    branch: int = 0,
    call_prefix: str = "",
) -> Trace:
    """``turns``: pieces of the response and whether each is trained. With ``model``, log-probs are its own; else −1."""
    response = [token for piece, _ in turns for token in piece]
    mask = [int(trained) for piece, trained in turns for _ in piece]
    logprobs = np.full(len(response), -1.0)
    if model is not None:
        logprobs = naive_logprobs(model, prompt + response, temperature)[len(prompt) - 1 :]
    spans, position = [], 0
    for number, (piece, trained) in enumerate(turns):
        if trained:
            call_id = f"{call_prefix}{session_id}/{branch}/{number}"
            end = position + len(piece)
            spans.append(
                SampledSpan(start=position, end=end, version=version, call_id=call_id, temperature=temperature)
            )
        position += len(piece)
    return Trace(
        trace_id=derived_id("trace", call_prefix, session_id, branch),
        session_id=session_id,
        attempt=1,
        group_id=group_id,
        task_id=group_id,
        policy="policy",
        purpose="train",
        harness="shell",
        builder="prefix_merging",
        branch=branch,
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(response),
        loss_mask=pack_mask(mask),
        logprobs=pack_logprobs(np.minimum(logprobs, 0.0) * np.array(mask)),
        spans=spans,
        reward=reward,
        finish_reason="stop",
    )


def random_traces(number: int, *, groups: int = 2, samples: int = 3, size: int = 24, model: Any = None) -> list[Trace]:
    """The traces of batch ``number``; the same arguments give the same. Prompt, turn, tool output, turn, tail."""
    random = np.random.default_rng(number)

    def piece(longest: int) -> list[int]:
        return random.integers(0, VOCABULARY, random.integers(2, longest)).tolist()

    traces = []
    for group in range(groups):
        prompt = piece(size)
        for sample in range(samples):
            traces.append(
                make_trace(
                    session_id=f"b{number}g{group}s{sample}",
                    group_id=f"b{number}g{group}",
                    reward=float(sample % 2),
                    prompt=prompt,
                    turns=[(piece(size), True), (piece(size), False), (piece(size), True), (piece(4), False)],
                    version=number - 1,
                    temperature=(0.7, 1.0, 1.3)[sample % 3],
                    model=model,
                )
            )
    return traces


def seal(number: int, traces: list[Trace], *, policy: str = "policy") -> BatchSealed:
    """The seal of batch ``number`` that fits ``traces``."""
    groups: dict[str, dict[str, float]] = {}
    for trace in traces:
        groups.setdefault(trace.group_id, {})[trace.session_id] = trace.reward
    return BatchSealed(
        policy=policy,
        batch=number,
        traces=len(traces),
        trained_tokens=sum(trace.trained_tokens for trace in traces),
        groups=[
            BatchGroup(group_id=group, sessions=[SessionReward(*item) for item in sessions.items()])
            for group, sessions in groups.items()
        ],
        oldest_version=number - 1,
        newest_version=number - 1,
    )


def batch_records(number: int, traces: list[Trace]) -> list[BatchTrace | BatchSealed]:
    """What the batcher writes for batch ``number``."""
    items = [BatchTrace(policy="policy", batch=number, index=i, trace=trace) for i, trace in enumerate(traces)]
    return [*items, seal(number, traces)]


def settings_for(run_dir: Path, model_dir: Path, **changes: Any) -> Settings:
    """Settings under which a few steps change the weights well."""
    return Settings(run_dir=run_dir, model_dir=model_dir, **{"learning_rate": 1e-3, "device": "cpu"} | changes)


def load(folder: Path) -> Any:
    return load_policy(folder, torch.device("cpu"))


def whole_ids(trace: Trace) -> list[int]:
    return [*unpack_ids(trace.prompt_ids).tolist(), *unpack_ids(trace.response_ids).tolist()]
