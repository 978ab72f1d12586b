"""Supervised warm start of the tiny policy on captured traces.

    python -m examples.tiny_policy.warm_start --base DIR --traces traces.jsonl.gz --out DIR

Loss is cross-entropy on the sampled tokens alone (the trace's loss mask). Each time a trace is drawn it is renamed: its
words are permuted, with held-out pairs kept apart, and the date in its prompt becomes another one. So a few hundred
traces teach to copy any name, on any day.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast

from examples.tiny_policy.build import save
from polar.demo.tasks import ADJECTIVES, HELD_OUT_EVERY, NOUNS
from schemas.packed import unpack_ids, unpack_mask
from schemas.traces import Trace

Ids = NDArray[np.int64]
DATE = "Current date: "
DAY_PLACES = np.array([0, 1, 2, 3, 5, 6, 8, 9])
"""Of the digits in YYYY-MM-DD; a digit is a token."""


class Example(msgspec.Struct, frozen=True):
    """``ids`` (n,) of a whole trace; ``mask`` (n,) is 1 on sampled tokens."""

    ids: Ids
    mask: NDArray[np.uint8]


def read_traces(path: Path) -> list[Trace]:
    """One Kafka value of ``polar.traces`` a line, gzipped where the name says so.

    Raises msgspec.ValidationError for anything else.
    """
    decoder = msgspec.json.Decoder(Trace)
    lines = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [decoder.decode(line) for line in lines.splitlines()]


def example(trace: Trace) -> Example:
    """The trace as one sequence."""
    prompt, response = unpack_ids(trace.prompt_ids), unpack_ids(trace.response_ids)
    mask = np.concatenate([np.zeros(len(prompt), np.uint8), unpack_mask(trace.loss_mask)])
    return Example(np.concatenate([prompt, response]).astype(np.int64), mask)


class Renamer:
    """Renames the words of a sequence and moves its date, id by id, without changing its length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.size = len(tokenizer)
        self.words = [
            [[self._token(tokenizer, form.format(word)) for word in words] for form in ("{}", " {}")]
            for words in (ADJECTIVES, NOUNS)
        ]
        self.digits = np.array([tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)])
        self.date = tokenizer.encode(DATE, add_special_tokens=False)

    @staticmethod
    def _token(tokenizer: PreTrainedTokenizerFast, text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    def table(self, rng: random.Random) -> Ids:
        """(vocabulary,) maps ids to ids: residues of the words move so that a held-out pair stays one."""
        table = np.arange(self.size)
        shift = rng.randrange(HELD_OUT_EVERY)
        for forms, move in zip(self.words, (shift, -shift), strict=True):
            order = _permutation(len(forms[0]), move, rng)
            for ids in forms:
                for i, target in enumerate(order):
                    if (old := ids[i]) is not None and (new := ids[target]) is not None:
                        table[old] = new
        return table

    def __call__(self, ids: Ids, rng: random.Random, day: str) -> Ids:
        """The sequence with other words, on ``day`` (eight digits)."""
        renamed = self.table(rng)[ids]
        n = len(self.date)
        for start in range(len(ids) - n - 10):
            if renamed[start : start + n].tolist() == self.date:
                renamed[start + n + DAY_PLACES] = self.digits[[int(d) for d in day]]
                break
        return renamed


def _permutation(n: int, move: int, rng: random.Random) -> list[int]:
    """A random permutation that sends residue r (mod HELD_OUT_EVERY) to r + move."""
    order = [0] * n
    for residue in range(HELD_OUT_EVERY):
        old = list(range(residue, n, HELD_OUT_EVERY))
        new = list(range((residue + move) % HELD_OUT_EVERY, n, HELD_OUT_EVERY))
        rng.shuffle(new)
        for i, j in zip(old, new, strict=True):
            order[i] = j
    return order


def pad(examples: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, t) ids and (b, t) float mask, padded on the right."""
    length = max(len(e.ids) for e in examples)
    ids = np.full((len(examples), length), pad_id)
    mask = np.zeros((len(examples), length), np.float32)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = e.ids
        mask[row, : len(e.ids)] = e.mask
    return torch.from_numpy(ids), torch.from_numpy(mask)


def cross_entropy(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean loss (nats) over the masked tokens of ``ids`` (b, t). What all rows begin with is computed once."""
    differs = ((ids != ids[:1]).any(0) | (mask > 0).any(0)).int()
    shared = int(differs.argmax()) - 1
    cache = DynamicCache()
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    hidden = model.model(input_ids=ids[:, shared:-1], past_key_values=cache, use_cache=True).last_hidden_state
    chosen = mask[:, shared + 1 :] > 0
    return F.cross_entropy(model.lm_head(hidden[chosen]), ids[:, shared + 1 :][chosen])


def train(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    *,
    steps: int,
    batch: int = 32,
    lr: float = 3e-3,
    seed: int = 0,
) -> None:
    """AdamW with a linear warm-up and a cosine to zero, in place."""
    rng, renamer = random.Random(seed), Renamer(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 * (1 + math.cos(math.pi * s / steps)))
    )
    start = time.monotonic()
    for step in range(steps):
        day = f"20{rng.randint(20, 59)}{rng.randint(1, 12):02}{rng.randint(1, 28):02}"
        drawn = [rng.choice(examples) for _ in range(batch)]
        ids, mask = pad([Example(renamer(e.ids, rng, day), e.mask) for e in drawn], tokenizer.pad_token_id)
        loss = cross_entropy(model, ids, mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.monotonic() - start:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    model = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    examples = [example(trace) for trace in read_traces(arguments.traces)]
    train(model, tokenizer, examples, steps=arguments.steps, lr=arguments.lr)
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
