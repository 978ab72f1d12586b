"""The demo's training without its services: the same model, template, tasks and loss, in one process.

    python -m examples.tiny_policy.rehearse --model DIR --lr 1e-3 --groups 24 --seeds 3

Sessions run the parsed command in a temporary folder and score it with the task's own check. Use it to tune the family,
the demonstrator's mixture and the learning rate; nothing that it samples becomes a trace of the project.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import subprocess
import tempfile
from itertools import islice
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast

from examples.tiny_policy.build import BASH_TOOL, chat
from examples.tiny_policy.demonstrator import FINAL, first_reply
from polar.demo.tasks import Exercise, exercises
from polar.grpo.step import BETAS

BATCH_GROUPS = 4
SAMPLES = 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_NEW = 48
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


class Episode(msgspec.Struct):
    """Two turns at most: (prompt ids, sampled ids, their log-probs) each."""

    turns: list[tuple[list[int], list[int], list[float]]]
    reward: float
    text: str


def run_shell(exercise: Exercise, command: str | None) -> tuple[str, float]:
    """What Pi's bash tool says to ``command``, and the reward of the folder that it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in exercise.files.items():
            Path(folder, name).write_text(text)
        said = "(no output)"
        if command is not None:
            done = _bash(command, folder)
            said = (done.stdout + done.stderr) or "(no output)"
            if done.returncode:
                said = f"{said.strip()}\n\nCommand exited with code {done.returncode}".removeprefix("(no output)\n\n")
        return said, float(_bash(exercise.check, folder).returncode == 0)


def _bash(command: str, folder: str) -> subprocess.CompletedProcess[str]:
    arguments = ["bash", "-c", command if "\0" not in command else "false"]
    return subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=5, check=False, env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL, errors="replace",
    )  # fmt: skip


def parse(text: str) -> str | None:
    """The command of the first tool call, as the engine's Hermes parser would find it; None without one."""
    if (match := CALL.search(text)) is None:
        return None
    try:
        return str(json.loads(match[1])["arguments"]["command"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: list[list[int]], eos: int) -> list[tuple[list[int], list[float]]]:
    """Ancestral sampling at temperature 1, left-padded, with a KV cache."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position = (attention.cumsum(1) - 1).clamp(min=0)
    cache, out = DynamicCache(), [([], []) for _ in prompts]
    live = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW):
        result = model(input_ids=ids, attention_mask=attention, position_ids=position, past_key_values=cache)
        logprobs = result.logits[:, -1].float().log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), 1)
        for row in live.nonzero().flatten().tolist():
            out[row][0].append(token := int(ids[row]))
            out[row][1].append(float(logprobs[row, token]))
            live[row] = token != eos
        if not live.any():
            break
        attention = F.pad(attention, (0, 1), value=1)
        position = position[:, -1:] + 1
    return out


def roll_out(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, tasks: list[Exercise]) -> list[Episode]:
    """One session of each exercise: a call, the shell's answer, a last word."""
    eos = tokenizer.eos_token_id
    chats = [chat(task.instruction, random.Random()) for task in tasks]
    prompts = [_render(tokenizer, messages) for messages in chats]
    episodes, again = [], []
    for task, prompt, (ids, logprobs) in zip(tasks, prompts, sample(model, prompts, eos), strict=True):
        text = tokenizer.decode(ids)
        command = parse(text)
        said, reward = run_shell(task, command)
        episodes.append(Episode([(prompt, ids, logprobs)], reward, text))
        if command is not None and ids[-1] == eos:
            again.append((episodes[-1], prompt + ids + _render_tool(tokenizer, said)))
    if again:
        for (episode, prompt), (ids, logprobs) in zip(again, sample(model, [p for _, p in again], eos), strict=True):
            episode.turns.append((prompt, ids, logprobs))
    return episodes


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text)


def _render_tool(tokenizer: PreTrainedTokenizerFast, said: str) -> list[int]:
    text = f"\n<|im_start|>user\n<tool_response>\n{said[-2000:]}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text)


def sequence(episode: Episode) -> tuple[list[int], list[float], list[int]]:
    """ids, log-probs and mask of the merged trace, all of one length."""
    prompt, ids, logprobs = episode.turns[-1]
    whole, all_logprobs, mask = prompt + ids, [0.0] * len(prompt) + logprobs, [0] * len(prompt) + [1] * len(ids)
    if len(episode.turns) == 2:
        first_prompt, first, first_logprobs = episode.turns[0]
        span = slice(len(first_prompt), len(first_prompt) + len(first))
        all_logprobs[span], mask[span] = first_logprobs, [1] * len(first)
    return whole, all_logprobs, mask


def grpo_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Episode]], max_grad_norm: float
) -> float:
    """One clipped, token-mean step over whole groups; returns the loss."""
    rows, advantages = [], []
    for group in groups:
        rewards = torch.tensor([episode.reward for episode in group])
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        rows += [sequence(episode) for episode in group]
    width = max(len(ids) for ids, _, _ in rows)
    ids, old, mask = (
        torch.tensor([values + [0] * (width - len(values)) for values in column]) for column in zip(*rows, strict=True)
    )
    logits = model(input_ids=ids).logits[:, :-1]
    new = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = (new - old[:, 1:]).exp()
    advantage = torch.tensor(advantages)[:, None]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    trained = mask[:, 1:].float()
    loss = -(torch.minimum(ratio * advantage, clipped * advantage) * trained).sum() / trained.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def pass_at_1(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, n: int) -> float:
    """Mean reward of ``n`` held-out sessions."""
    episodes = roll_out(model, tokenizer, list(islice(exercises(0, held_out=True), n)))
    return sum(e.reward for e in episodes) / n


def rehearse(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace, seed: int
) -> None:
    """Groups stream in; four with variance make a step. Samples come from the policy ``stale`` steps ago."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=BETAS, weight_decay=0.0)
    before = pass_at_1(model, tokenizer, arguments.evaluate)
    history, waiting, rewards = [copy.deepcopy(model)], [], []
    source = exercises(seed + 1000)
    for _ in range(arguments.groups):
        sampler = history[max(0, len(history) - 1 - arguments.stale)]
        group = roll_out(sampler, tokenizer, [next(source)] * SAMPLES)
        rewards.append(sum(e.reward for e in group) / SAMPLES)
        if 0 < rewards[-1] < 1:
            waiting.append(group)
        if len(waiting) == BATCH_GROUPS:
            grpo_step(model, optimizer, waiting, arguments.max_grad_norm)
            waiting = []
            history.append(copy.deepcopy(model))
    after = pass_at_1(model, tokenizer, arguments.evaluate)
    curve = " ".join(f"{sum(rewards[i : i + 4]) / len(rewards[i : i + 4]):.2f}" for i in range(0, len(rewards), 4))
    print(
        f"seed {seed} lr {arguments.lr}: before {before:.3f} after {after:.3f} steps {len(history) - 1} curve {curve}",
        flush=True,
    )


def scripted(tokenizer: PreTrainedTokenizerFast, n: int, seed: int) -> list[Episode]:
    """Demonstrations in the form of episodes, for tuning before any trace is captured."""
    rng, episodes = random.Random(seed), []
    for task in islice(exercises(seed), n):
        prompt = _render(tokenizer, chat(task.instruction, rng))
        text = first_reply(task, rng)
        ids = tokenizer.encode(f"{text}<|im_end|>")
        command = parse(text)
        said, reward = run_shell(task, command)
        episode = Episode([(prompt, ids, [0.0] * len(ids))], reward, text)
        if command is not None:
            last = tokenizer.encode(f"{FINAL}<|im_end|>")
            episode.turns.append((prompt + ids + _render_tool(tokenizer, said), last, [0.0] * len(last)))
        episodes.append(episode)
    return episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--stale", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=96)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for seed in range(arguments.seeds):
        rehearse(model, tokenizer, arguments, seed)


if __name__ == "__main__":
    main()
