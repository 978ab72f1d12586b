"""The demo's task family: one-command file exercises, generated from a seed and verified by running a check.

Names are pairs such as ``amberFox``. Each pair belongs to the train half or to the held-out part, never to both, so the
two sets share no name, no file and no instruction. An exercise knows its solution; the agent only sees the instruction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from schemas.tasks import Deadlines, EvaluatorSpec, HarnessSpec, Purpose, RuntimeSpec, TaskSpec

ADJECTIVES = (
    "amber azure brave brisk broad calm clear cool crisp damp dark deep dry dusty early fair faint fast firm fresh "
    "gentle glad golden grand green hollow keen kind large late light lively lucky mellow mild misty"
).split()
NOUNS = (
    "Apple Arrow Badge Basin Bell Bird Boat Bridge Brook Candle Canyon Cedar Cloud Coral Crane Desk Drum Falcon Fern "
    "Field Forest Fox Garden Glass Harbor Hill Island Ivy Kite Lake Lamp Lantern Leaf Lemon Maple Meadow"
).split()
HELD_OUT_EVERY = 4
"""One name pair in four is held out."""

SYSTEM_PROMPT = "You are a shell agent."
MAX_TOKENS = 96


class Exercise(msgspec.Struct, frozen=True, kw_only=True):
    """``source``, ``target`` and ``word`` are the names that occur; ``files`` is the work folder at the start."""

    kind: str
    instruction: str
    files: dict[str, str]
    check: str
    solution: str
    source: str
    target: str
    word: str


def is_held_out(name: str) -> bool:
    """Whether the pair ``adjectiveNoun`` (a suffix ``.txt`` is ignored) is kept for evaluation."""
    adjective, noun = _words(name.removesuffix(".txt"))
    return (ADJECTIVES.index(adjective) + NOUNS.index(noun)) % HELD_OUT_EVERY == 0


def _words(name: str) -> tuple[str, str]:
    start = next(i for i, letter in enumerate(name) if letter.isupper())
    return name[:start], name[start:]


def _write(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice((f"Write {word} to {target} now.", f"Put the text {word} into {target} please."))
    check = f'test "$(cat {target})" = {word}'
    return _exercise("write", text, {}, check, f"echo {word} > {target}", source, target, word)


def _append(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice((f"Append {word} to {target} now.", f"Add the line {word} at the end of {target} please."))
    first = source.removesuffix(".txt")
    check = f"printf '{first}\\n{word}\\n' | cmp -s - {target}"
    return _exercise("append", text, {target: f"{first}\n"}, check, f"echo {word} >> {target}", source, target, word)


def _copy(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice((f"Copy {source} to {target} now.", f"Make a copy of {source} named {target} please."))
    check = f'test "$(cat {source})" = {word} && test "$(cat {target})" = {word}'
    return _exercise("copy", text, {source: f"{word}\n"}, check, f"cp {source} {target}", source, target, word)


def _rename(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice((f"Rename {source} to {target} now.", f"Give {source} the new name {target} please."))
    check = f'test ! -e {source} && test "$(cat {target})" = {word}'
    return _exercise("rename", text, {source: f"{word}\n"}, check, f"mv {source} {target}", source, target, word)


def _delete(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice((f"Delete {source} but keep {target} please.", f"Remove {source} and leave {target} alone."))
    check = f'test ! -e {source} && test "$(cat {target})" = {word}'
    files = {source: f"{word}\n", target: f"{word}\n"}
    return _exercise("delete", text, files, check, f"rm {source}", source, target, word)


def _count(rng: random.Random, source: str, target: str, word: str) -> Exercise:
    text = rng.choice(
        (f"Count the lines of {source} into {target} now.", f"Save how long {source} is in {target} please.")
    )
    lines = rng.randint(2, 9)
    check = f'test "$(cat {target})" -eq {lines}'
    files = {source: f"{word}\n" * lines}
    return _exercise("count", text, files, check, f"wc -l < {source} > {target}", source, target, word)


KINDS = {"write": _write, "append": _append, "copy": _copy, "rename": _rename, "delete": _delete, "count": _count}


def _exercise(
    kind: str, text: str, files: dict[str, str], check: str, solution: str, source: str, target: str, word: str
) -> Exercise:
    return Exercise(
        kind=kind,
        instruction=text,
        files=files,
        check=check,
        solution=solution,
        source=source,
        target=target,
        word=word,
    )


def _names(rng: random.Random, held_out: bool) -> list[str]:
    """Three pairs of one side, with no adjective and no noun in common."""
    names: list[str] = []
    while len(names) < 3:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        fresh = all(adjective != a and noun != n for a, n in map(_words, names))
        if fresh and is_held_out(f"{adjective}{noun}") == held_out:
            names.append(f"{adjective}{noun}")
    return names


def exercises(seed: int, *, held_out: bool = False) -> Iterator[Exercise]:
    """Endless, the kinds in turn, no instruction twice. The same arguments give the same exercises."""
    rng = random.Random(f"{'held-out' if held_out else 'train'} {seed}")
    seen: set[str] = set()
    kinds = list(KINDS.values())
    while True:
        rng.shuffle(kinds)
        for make in kinds:
            source, target, word = _names(rng, held_out)
            exercise = make(rng, f"{source}.txt", f"{target}.txt", word)
            if exercise.instruction not in seen:
                seen.add(exercise.instruction)
                yield exercise


def task(exercise: Exercise, purpose: Purpose, num_samples: int, policy: str = "policy") -> TaskSpec:
    """The exercise for Pi with its bash tool alone, scored by the exit code of the exercise's check."""
    options = {"system_prompt": SYSTEM_PROMPT, "tools": ["bash"], "max_tokens": MAX_TOKENS}
    return TaskSpec(
        instruction=exercise.instruction,
        evaluator=EvaluatorSpec(command=exercise.check),
        policy=policy,
        purpose=purpose,
        num_samples=num_samples,
        harness=HarnessSpec(name="pi", options=options),
        runtime=RuntimeSpec(files=exercise.files),
        deadlines=Deadlines(init_s=60.0, agent_s=60.0, evaluation_s=30.0),
        metadata={"kind": exercise.kind},
    )


def train_tasks(n: int, seed: int = 0, *, num_samples: int = 8, policy: str = "policy") -> list[TaskSpec]:
    """``n`` tasks over train names, a group of ``num_samples`` sessions each."""
    source = exercises(seed)
    return [task(next(source), "train", num_samples, policy) for _ in range(n)]


def held_out_tasks(n: int, *, num_samples: int = 1, policy: str = "policy") -> list[TaskSpec]:
    """The first ``n`` evaluation tasks, always the same ones, over held-out names."""
    source = exercises(0, held_out=True)
    return [task(next(source), "eval", num_samples, policy) for _ in range(n)]
