"""A body becomes TaskSpecs, or one readable error that names the field and what is expected."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec
from litestar.exceptions import ClientException

from polar.evaluators import EVALUATORS
from polar.harnesses import HARNESSES, HarnessError
from polar.runtimes.names import INSIDE, VARIABLE, wrong_path, wrong_variable
from polar.trajectories.builders import BUILDERS
from schemas.tasks import SamplingSpec, TaskSpec

MOST_SAMPLING = 4096
"""Bytes of a task's sampling as JSON: it travels in the session token, in the URL of each call."""
STRUCTURES = ("json", "regex", "choice", "grammar")
MOST_TASKS = 10_000
"""In one request."""
RUNTIMES = ("local",)


def parse_tasks(body: bytes, policy: str) -> list[TaskSpec]:
    """One TaskSpec or a list of them, as JSON, for ``policy``. Raises ClientException; takes all of them or none."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientException(f"the body is not JSON: {error}") from None
    if not isinstance(raw, list):
        return [_task(raw, policy, "task")]
    if not 1 <= len(raw) <= MOST_TASKS:
        raise ClientException(f"expected 1 to {MOST_TASKS} tasks, got {len(raw)}")
    tasks = [_task(one, policy, f"tasks[{index}]") for index, one in enumerate(raw)]
    if len({task.task_id for task in tasks}) < len(tasks):
        raise ClientException("two tasks of this request have the same task_id")
    return tasks


def _task(raw: Any, policy: str, where: str) -> TaskSpec:
    task = _converted(raw, where)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", task.task_id):
        raise ClientException(f"{where}.task_id: expected 1 to 128 letters, digits, '.', '_' or '-'")
    if not task.instruction.strip():
        raise ClientException(f"{where}.instruction: expected text, got none")
    _one_of(task.policy, [policy], f"{where}.policy")
    _one_of(task.harness.name, HARNESSES, f"{where}.harness.name")
    _one_of(task.runtime.kind, RUNTIMES, f"{where}.runtime.kind")
    _one_of(task.evaluator.kind, EVALUATORS, f"{where}.evaluator.kind")
    _one_of(task.builder, BUILDERS, f"{where}.builder")
    _check_names(task, where)
    _check_commands(task, where)
    _check_harness(task, f"{where}.harness.options")
    _check_sampling(task.sampling, f"{where}.sampling")
    return task


def _converted(raw: Any, where: str) -> TaskSpec:
    try:
        return msgspec.convert(raw, TaskSpec)
    except msgspec.ValidationError as error:
        raise ClientException(readable(str(error), where)) from None


def _check_names(task: TaskSpec, where: str) -> None:
    """What the sandbox and the evaluator would refuse, in each session anew."""
    reward_file = task.evaluator.reward_file
    if reward_file is not None and wrong_path(reward_file):
        raise ClientException(f"{where}.evaluator.reward_file: expected {INSIDE}, got {_short(reward_file)}")
    for name in task.runtime.files:
        if wrong_path(name):
            raise ClientException(f"{where}.runtime.files: expected {INSIDE}, got {_short(name)}")
    for name in task.runtime.environment:
        if wrong_variable(name):
            raise ClientException(f"{where}.runtime.environment: expected {VARIABLE}, got {_short(name)}")


def _check_commands(task: TaskSpec, where: str) -> None:
    """No program can be given a NUL character."""
    texts = {"evaluator.command": task.evaluator.command}
    texts |= {f"runtime.prepare[{index}]": command for index, command in enumerate(task.runtime.prepare)}
    texts |= {f"runtime.environment.{name}": value for name, value in task.runtime.environment.items()}
    for field, text in texts.items():
        if "\0" in text:
            raise ClientException(f"{where}.{field}: expected text without NUL characters")


def _check_harness(task: TaskSpec, where: str) -> None:
    try:
        HARNESSES[task.harness.name].checked(task.harness.options, task.instruction)
    except HarnessError as error:
        raise ClientException(readable(str(error).removeprefix(f"harness {task.harness.name}: "), where)) from None


def _check_sampling(sampling: SamplingSpec, where: str) -> None:
    """What the engine would refuse at each call, and what makes a token too long for a URL."""
    if "" in (sampling.stop or []):
        raise ClientException(f"{where}.stop: expected texts that are not empty")
    if sampling.structured_outputs is not None:
        _check_structure(sampling.structured_outputs, f"{where}.structured_outputs")
    size = len(msgspec.json.encode(sampling))
    if size > MOST_SAMPLING:
        limit = f"expected at most {MOST_SAMPLING} bytes of JSON, got {size}"
        raise ClientException(f"{where}: {limit}: it travels in the URL of each call, so make the schema smaller")


def _check_structure(structure: dict[str, Any], where: str) -> None:
    if len(structure) != 1 or next(iter(structure)) not in STRUCTURES:
        got = ", ".join(map(_short, structure)) or "none"
        raise ClientException(f"{where}: expected exactly one of {', '.join(STRUCTURES)}, got {got}")
    (kind, value), *_ = structure.items()
    expected: Any = {"json": dict[str, Any] | str, "choice": list[str]}.get(kind, str)
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ClientException(readable(str(error), f"{where}.{kind}")) from None
    if value in ("", []):
        raise ClientException(f"{where}.{kind}: expected one that is not empty")


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


def _one_of(value: str, known: Collection[str], where: str) -> None:
    if value not in known:
        raise ClientException(f"{where}: expected one of {', '.join(sorted(known))}, got {value!r}")


def readable(message: str, where: str) -> str:
    """
    >>> readable("Expected `int`, got `str` - at `$.limits.processes`", "task")
    'task.limits.processes: expected int, got str'
    >>> readable("Object contains unknown field `colour`", "tasks[2]")
    'tasks[2]: unknown field colour'
    """
    what, _, path = message.partition(" - at `$")
    what = what.replace("`", "").replace("Object contains ", "").replace("Object missing ", "missing ")
    return f"{where}{path.rstrip('`')}: {what[0].lower()}{what[1:]}"
