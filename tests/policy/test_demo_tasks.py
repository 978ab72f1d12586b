"""The demo's tasks: sound checks, and sets that share nothing."""

from __future__ import annotations

import re
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from examples.tiny_policy.demonstrator import look, mistakes
from polar.demo.tasks import KINDS, Exercise, exercises, held_out_tasks, is_held_out, train_tasks

SAMPLE = list(islice(exercises(3), 18)) + list(islice(exercises(3, held_out=True), 18))
NAME = re.compile(r"\b[a-z]+[A-Z][a-z]+\b")


def bash(command: str, folder: Path) -> int:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, check=False).returncode


def reward(exercise: Exercise, command: str, folder: Path) -> float:
    for name, text in exercise.files.items():
        (folder / name).write_text(text)
    bash(command, folder)
    return float(bash(exercise.check, folder) == 0)


@pytest.mark.parametrize("exercise", SAMPLE, ids=lambda exercise: exercise.solution)
def test_the_solution_passes_and_nothing_else_does(exercise: Exercise, tmp_path: Path) -> None:
    wrong = ["true", look(exercise), *mistakes(exercise)]
    for number, command in enumerate(wrong):
        (folder := tmp_path / str(number)).mkdir()
        assert reward(exercise, command, folder) == 0.0, command
    (folder := tmp_path / "solved").mkdir()
    assert reward(exercise, exercise.solution, folder) == 1.0


def test_the_sample_has_every_kind() -> None:
    assert {exercise.kind for exercise in SAMPLE} == set(KINDS)


def test_train_and_held_out_share_no_name_no_file_and_no_instruction() -> None:
    train, held_out = train_tasks(400, seed=1), held_out_tasks(200)
    names = [{name for task in tasks for name in NAME.findall(task.instruction)} for tasks in (train, held_out)]
    assert all(names)
    assert not names[0] & names[1]
    assert all(is_held_out(name) for name in names[1])
    assert not any(is_held_out(name) for name in names[0])
    files = [{name for task in tasks for name in task.runtime.files} for tasks in (train, held_out)]
    assert not files[0] & files[1]
    assert not {task.instruction for task in train} & {task.instruction for task in held_out}


def test_no_instruction_comes_twice_and_kinds_are_even() -> None:
    tasks = train_tasks(300, seed=2)
    assert len({task.instruction for task in tasks}) == 300
    counts = [sum(task.metadata["kind"] == kind for task in tasks) for kind in KINDS]
    assert max(counts) - min(counts) <= 2


def test_seeds_give_the_same_tasks_again_and_other_seeds_give_others() -> None:
    def texts(seed: int) -> list[str]:
        return [task.instruction for task in train_tasks(20, seed)]

    assert texts(5) == texts(5)
    assert texts(5) != texts(6)
    assert held_out_tasks(10)[0].purpose == "eval"
    assert train_tasks(1)[0].purpose == "train"
    assert train_tasks(1, num_samples=3)[0].num_samples == 3
