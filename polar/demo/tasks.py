"""The demo's task family: one-command file exercises, generated from a seed and verified by running a check.

Names are pairs such as ``amberFox``. Each pair belongs to the train half or to the held-out part, never to both, so the
two sets share no name, no file and no instruction. An exercise knows its solution; the agent only sees the instruction.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from schemas.tasks import Deadlines, EvaluatorSpec, HarnessSpec, Purpose, RuntimeSpec, TaskSpec

ADJECTIVES = (  # noqa: SIM905 - a list would take 36 lines
    "amber azure brave brisk broad calm clear cool crisp damp dark deep dry dusty early fair faint fast firm fresh "
    "gentle glad golden grand green hollow keen kind large late light lively lucky mellow mild misty"
).split()
NOUNS = (  # noqa: SIM905
    "Apple Arrow Badge Basin Bell Bird Boat Bridge Brook Candle Canyon Cedar Cloud Coral Crane Desk Drum Falcon Fern "
    "Field Forest Fox Garden Glass Harbor Hill Island Ivy Kite Lake Lamp Lantern Leaf Lemon Maple Meadow"
).split()
HELD_OUT_EVERY = 4
"""One name pair in four is held out."""

SYSTEM_PROMPT = "You are a shell agent."
MAX_TOKENS = 96


class Names(msgspec.Struct, frozen=True):
    """What an exercise is about: two files and a line of text. No two share a word."""

    source: str
    target: str
    word: str


class Exercise(msgspec.Struct, frozen=True, kw_only=True):
    """``files`` is the work folder at the start; ``check`` is a shell command that succeeds once it is solved."""

    kind: str
    names: Names
    instruction: str
    check: str
    solution: str
    files: dict[str, str] = {}


def is_held_out(name: str) -> bool:
    """Whether the pair ``adjectiveNoun`` (a suffix ``.txt`` is ignored) is kept for evaluation."""
    adjective, noun = _words(name.removesuffix(".txt"))
    return (ADJECTIVES.index(adjective) + NOUNS.index(noun)) % HELD_OUT_EVERY == 0


def _words(name: str) -> tuple[str, str]:
    start = next(i for i, letter in enumerate(name) if letter.isupper())
    return name[:start], name[start:]


def _write(rng: random.Random, n: Names) -> Exercise:
    texts = f"Write {n.word} to {n.target} now.", f"Put the text {n.word} into {n.target} please."
    return Exercise(
        kind="write",
        names=n,
        instruction=rng.choice(texts),
        check=f'test "$(cat {n.target})" = {n.word}',
        solution=f"echo {n.word} > {n.target}",
    )


def _append(rng: random.Random, n: Names) -> Exercise:
    texts = f"Append {n.word} to {n.target} now.", f"Add the line {n.word} at the end of {n.target} please."
    first = n.source.removesuffix(".txt")
    return Exercise(
        kind="append",
        names=n,
        instruction=rng.choice(texts),
        files={n.target: f"{first}\n"},
        check=f"printf '{first}\\n{n.word}\\n' | cmp -s - {n.target}",
        solution=f"echo {n.word} >> {n.target}",
    )


def _copy(rng: random.Random, n: Names) -> Exercise:
    texts = f"Copy {n.source} to {n.target} now.", f"Make a copy of {n.source} named {n.target} please."
    return Exercise(
        kind="copy",
        names=n,
        instruction=rng.choice(texts),
        files={n.source: f"{n.word}\n"},
        check=f'test "$(cat {n.source})" = {n.word} && test "$(cat {n.target})" = {n.word}',
        solution=f"cp {n.source} {n.target}",
    )


def _rename(rng: random.Random, n: Names) -> Exercise:
    texts = f"Rename {n.source} to {n.target} now.", f"Give {n.source} the new name {n.target} please."
    return Exercise(
        kind="rename",
        names=n,
        instruction=rng.choice(texts),
        files={n.source: f"{n.word}\n"},
        check=f'test ! -e {n.source} && test "$(cat {n.target})" = {n.word}',
        solution=f"mv {n.source} {n.target}",
    )


def _delete(rng: random.Random, n: Names) -> Exercise:
    texts = f"Delete {n.source} but keep {n.target} please.", f"Remove {n.source} and leave {n.target} alone."
    return Exercise(
        kind="delete",
        names=n,
        instruction=rng.choice(texts),
        files={n.source: f"{n.word}\n", n.target: f"{n.word}\n"},
        check=f'test ! -e {n.source} && test "$(cat {n.target})" = {n.word}',
        solution=f"rm {n.source}",
    )


def _count(rng: random.Random, n: Names) -> Exercise:
    texts = f"Count the lines of {n.source} into {n.target} now.", f"Save how long {n.source} is in {n.target} please."
    text, lines = rng.choice(texts), rng.randint(2, 9)
    return Exercise(
        kind="count",
        names=n,
        instruction=text,
        files={n.source: f"{n.word}\n" * lines},
        check=f'test "$(cat {n.target})" -eq {lines}',
        solution=f"wc -l < {n.source} > {n.target}",
    )


KINDS = {"write": _write, "append": _append, "copy": _copy, "rename": _rename, "delete": _delete, "count": _count}


def _pairs(rng: random.Random, held_out: bool) -> list[str]:
    """Three name pairs of one side, with no adjective and no noun in common."""
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
            source, target, word = _pairs(rng, held_out)
            exercise = make(rng, Names(f"{source}.txt", f"{target}.txt", word))
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
