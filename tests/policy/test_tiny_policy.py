"""The shipped model: its size, its tokenizer, and a chat template whose history keeps the sampled ids."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from examples.tiny_policy.build import BASH_TOOL, PARAMETER_LIMIT, build_model, chat
from examples.tiny_policy.demonstrator import FINAL, reply, tool_call
from examples.tiny_policy.rehearse import parse
from examples.tiny_policy.warm_start import Example, Renamer, cross_entropy, pad
from polar.demo.tasks import ADJECTIVES, NOUNS, Exercise, exercises, held_out_tasks, is_held_out

MODEL = Path("examples/tiny_policy/model")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: bool = True) -> str:
    given_tools = [BASH_TOOL] if tools else None
    return tokenizer.apply_chat_template(messages, tools=given_tools, add_generation_prompt=True, tokenize=False)


def test_it_is_tiny_float32_and_samples_plainly() -> None:
    weights = load_file(MODEL / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) < PARAMETER_LIMIT
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert json.loads((MODEL / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["temperature"] == 1.0
    assert not {"top_p", "top_k", "min_p"} & set(generation)
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 6 * 2**20


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_word_of_the_tasks_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in [f" {word}" for word in ADJECTIVES] + NOUNS:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


@pytest.mark.parametrize(
    "command", ["echo amberFox > deepHill.txt", 'printf "a\\n" | tee ü.txt', "echo '\"' && ls -la"]
)
def test_history_that_is_rendered_again_keeps_the_sampled_ids(tokenizer: PreTrainedTokenizerFast, command: str) -> None:
    messages = chat("Write amberFox to deepHill.txt now.")
    prompt = tokenizer.encode(render(tokenizer, messages))
    sampled = tokenizer.encode(f"<tool_call>\n{_call(command)}\n</tool_call><|im_end|>")
    function = {"name": "bash", "arguments": {"command": command}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "(no output)", "tool_call_id": "c"},
    ]
    again = tokenizer.encode(render(tokenizer, messages))
    assert again[: len(prompt) + len(sampled)] == prompt + sampled
    assert len(prompt) <= 300


def _call(command: str) -> str:
    return json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)


def test_the_demonstrators_calls_are_those_that_the_parser_reads() -> None:
    assert parse(tool_call("echo a > b.txt")) == "echo a > b.txt"
    assert parse(FINAL) is None


def test_the_template_takes_chats_without_tools_or_system_and_several_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    calls = [{"function": {"name": "bash", "arguments": {"command": c}}} for c in ("ls", "pwd")]
    text = render(tokenizer, [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}])
    assert text.count("<tool_call>") == 2
    assert text.startswith("<|im_start|>system\n<tools>")
    assert "<tools>" not in render(tokenizer, [{"role": "user", "content": "Hi"}], tools=False)


def test_the_model_is_a_coin_toss_but_knows_the_form(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tasks = held_out_tasks(12)
    for task, exercise in zip(tasks, exercises(0, held_out=True), strict=False):
        prompt = torch.tensor([tokenizer.encode(render(tokenizer, chat(task.instruction)))])
        with torch.no_grad():
            first = model(input_ids=prompt).logits[0, -1].softmax(-1)
        acts = float(first[tokenizer.convert_tokens_to_ids("<tool_call>")])
        idles = float(first[tokenizer.encode(FINAL)[0]])
        assert acts + idles > 0.95, exercise.instruction
        assert 0.2 < acts < 0.95, exercise.instruction


def test_renaming_keeps_the_length_the_side_and_the_shape(tokenizer: PreTrainedTokenizerFast) -> None:
    renamer, rng = Renamer(tokenizer), random.Random(1)
    text = render(tokenizer, chat("Copy amberFox.txt to deepHill.txt now."))
    ids = np.array(tokenizer.encode(text))
    seen = set()
    for _ in range(20):
        renamed = tokenizer.decode(renamer(ids, rng, "20310405"))
        assert "Current date: 2031-04-05\n" in renamed
        line = renamed.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        copied, source, to, target, now = line.split()
        assert (copied, to, now) == ("Copy", "to", "now.")
        seen.add(source)
        assert is_held_out(source) == is_held_out("amberFox.txt")
        assert is_held_out(target) == is_held_out("deepHill.txt")
    assert len(seen) > 10


def test_the_shared_beginning_changes_no_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(tokenizer, 0)
    rows = [[*tokenizer.encode(render(tokenizer, chat(text))), 5, 6, 2] for text in ("Go.", "Write it down, please.")]
    batch = [Example(np.array(ids), np.array([0] * (len(ids) - 3) + [1] * 3, np.uint8)) for ids in rows]
    ids, mask = pad(batch, tokenizer.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
        plain = torch.nn.functional.cross_entropy(logits[mask[:, 1:] > 0], ids[:, 1:][mask[:, 1:] > 0])
        assert torch.allclose(plain, cross_entropy(model, ids, mask), atol=1e-4)


def test_the_demonstrator_acts_once_and_then_ends() -> None:
    known: dict[str, Exercise] = {exercise.instruction: exercise for exercise in islice(exercises(0), 200)}
    rng = random.Random(0)
    first = [reply(chat(text)[1:], known, rng) for text in known]
    acts = [parse(text) for text in first]
    right = sum(command == exercise.solution for command, exercise in zip(acts, known.values(), strict=True))
    assert 0.3 < right / len(known) < 0.55
    assert all(command is not None or text == FINAL for command, text in zip(acts, first, strict=True))
    assert reply([{"role": "tool", "content": "(no output)"}], known, rng) == FINAL
    with pytest.raises(KeyError):
        reply(chat("Do something else.")[1:], known, rng)
