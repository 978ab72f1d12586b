"""Makes the untrained tiny policy: a byte-level BPE, a Hermes chat template and a small Qwen3 with random weights.

    python -m examples.tiny_policy.build OUT_DIR

The tokenizer is trained on the exercises' train half and on what Pi and the shell say around them.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy.demonstrator import FINAL, look, mistakes, tool_call
from polar.demo.tasks import ADJECTIVES, NOUNS, SYSTEM_PROMPT, exercises

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
PARAMETER_LIMIT = 1_000_000
EMBEDDING_STD = 0.06
NEAR = 4
"""The fastest rotary frequencies, which tell one place from the next."""
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command in the current working directory.",
        "parameters": {
            "type": "object",
            "required": ["command"],
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        },
    },
}
SHELL_SAYS = [
    "(no output)",
    "cat: amberFox.txt: No such file or directory\n\nCommand exited with code 1",
    "cp: cannot stat 'amberFox.txt': No such file or directory\n\nCommand exited with code 1",
    "mv: cannot stat 'amberFox.txt': No such file or directory\n\nCommand exited with code 1",
    "rm: cannot remove 'amberFox.txt': No such file or directory\n\nCommand exited with code 1",
    "bash: line 1: syntax error near unexpected token `newline'",
    "/bin/bash: line 1: echos: command not found\n\nCommand exited with code 127",
    "5 amberFox.txt",
]


def corpus() -> list[str]:
    """Text that the tokenizer's merges are learnt from: every word alone and after a space, then chats."""
    lines = [f" {word}" for word in ADJECTIVES + NOUNS] * 20 + [word for word in ADJECTIVES + NOUNS] * 20
    lines += [f"{SYSTEM_PROMPT}\nCurrent date: 2026-11-30\nCurrent working directory: /work\n", *SHELL_SAYS, FINAL] * 20
    lines += [
        '{"name": "bash", "arguments": {"command": "string", "timeout": "number"}}',
        "system user assistant tool",
    ] * 20
    for exercise in islice(exercises(0), 600):
        lines.append(exercise.instruction)
        lines += [tool_call(command) for command in [exercise.solution, look(exercise), *mistakes(exercise)]]
    return lines


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, digits one by one, tags as single tokens. Any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r" ?[A-Z]?[a-z]+|[A-Z]|\d| ?[^\sA-Za-z\d]+|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=5, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(TAGS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (HERE / "chat_template.jinja").read_text()
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random weights, float32. Raises ValueError when it is no longer a tiny model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    if (count := sum(p.numel() for p in model.parameters())) >= PARAMETER_LIMIT:
        raise ValueError(f"{count} parameters, but the limit is {PARAMETER_LIMIT}")
    start_as_copier(model)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


@torch.no_grad()
def start_as_copier(model: Qwen3ForCausalLM) -> None:
    """Sets the first two layers to an induction head; training starts from there and may change all of it.

    A small model needs long training before it finds by itself that what followed a token may follow it again. Here
    tokens live in the lower half of the residual stream. Two heads of layer 0 look at the token before and write it
    into the upper half; two heads of layer 1 compare that with the token at hand, and write the token found there. The
    last two dimensions of the lower half are alike for all tokens: heads that look by distance alone read them.
    """
    config = model.config
    half, dim = config.hidden_size // 2, config.head_dim
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDING_STD)
    embedding[:, half - 2 : half] = EMBEDDING_STD * 2
    embedding[:, half:] = 0.0
    before, match = (layer.self_attn for layer in model.model.layers[:2])
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    before.q_norm.weight.fill_(2.3)
    before.k_norm.weight.fill_(2.3)
    match.q_norm.weight.fill_(1.5)
    match.k_norm.weight.fill_(1.5)
    for head in range(2):
        rows, lower, upper = (slice(start + dim * head, start + dim * (head + 1)) for start in (0, 0, half))
        query, key = torch.zeros(dim), torch.zeros(dim)
        query[:NEAR] = 1.0
        key[:NEAR], key[dim // 2 : dim // 2 + NEAR] = theta[:NEAR].cos(), theta[:NEAR].sin()
        before.q_proj.weight[rows] = 0.0
        before.k_proj.weight[rows] = 0.0
        before.o_proj.weight[:, rows] = 0.0
        match.o_proj.weight[:, rows] = 0.0
        before.q_proj.weight[rows, half - 2 : half] = query[:, None]
        before.k_proj.weight[rows, half - 2 : half] = key[:, None]
        _route(before.v_proj.weight, rows, lower, 1.0)
        _route(before.o_proj.weight, upper, rows, EMBEDDING_STD)
        _route(match.q_proj.weight, rows, lower, 1.0)
        _route(match.k_proj.weight, rows, upper, 1.0)
        _route(match.v_proj.weight, rows, lower, 1.0)
        _route(match.o_proj.weight, lower, rows, 3 * EMBEDDING_STD)


def _route(weight: torch.Tensor, outputs: slice, inputs: slice, scale: float) -> None:
    """Makes ``outputs`` a copy of ``inputs``."""
    weight[outputs] = 0.0
    weight[outputs, inputs] = scale * torch.eye(outputs.stop - outputs.start)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes config, generation_config, tokenizer, template and model.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": tokenizer.eos_token_id}
    generation["pad_token_id"] = tokenizer.pad_token_id
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def chat(instruction: str, rng: random.Random | None = None) -> list[dict[str, Any]]:
    """The first request's messages as Pi sends them; with ``rng``, on a random date."""
    date = "2026-11-30" if rng is None else f"20{rng.randint(20, 49)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    system = f"{SYSTEM_PROMPT}\nCurrent date: {date}\nCurrent working directory: /work"
    return [{"role": "system", "content": system}, {"role": "user", "content": [{"type": "text", "text": instruction}]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    save(model, tokenizer, arguments.out)
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
