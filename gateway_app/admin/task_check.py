"""A body becomes TaskSpecs, or one readable error that names the field and what is expected."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec
from litestar.exceptions import ClientException

from polar.evaluators import EVALUATORS
from polar.harnesses import pi, shell
from polar.trajectories.builders import BUILDERS
from schemas.tasks import TaskSpec

MOST_TASKS = 10_000
"""In one request."""
HARNESS_OPTIONS = {"pi": pi.Options, "shell": shell.Options}
RUNTIMES = ("local",)


def parse_tasks(body: bytes) -> list[TaskSpec]:
    """One TaskSpec or a list of them, as JSON. Raises ClientException, and takes all of them or none."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientException(f"the body is not JSON: {error}") from None
    if not isinstance(raw, list):
        return [_task(raw, "task")]
    if not 1 <= len(raw) <= MOST_TASKS:
        raise ClientException(f"expected 1 to {MOST_TASKS} tasks, got {len(raw)}")
    tasks = [_task(one, f"tasks[{index}]") for index, one in enumerate(raw)]
    if len({task.task_id for task in tasks}) < len(tasks):
        raise ClientException("two tasks of this request have the same task_id")
    return tasks


def _task(raw: Any, where: str) -> TaskSpec:
    task: TaskSpec = _convert(raw, TaskSpec, where)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", task.task_id):
        raise ClientException(f"{where}.task_id: expected 1 to 128 letters, digits, '.', '_' or '-'")
    if not task.instruction.strip():
        raise ClientException(f"{where}.instruction: expected text, got none")
    _one_of(task.harness.name, HARNESS_OPTIONS, f"{where}.harness.name")
    _one_of(task.runtime.kind, RUNTIMES, f"{where}.runtime.kind")
    _one_of(task.evaluator.kind, EVALUATORS, f"{where}.evaluator.kind")
    _one_of(task.builder, BUILDERS, f"{where}.builder")
    _convert(task.harness.options, HARNESS_OPTIONS[task.harness.name], f"{where}.harness.options")
    return task


def _one_of(value: str, known: Collection[str], where: str) -> None:
    if value not in known:
        raise ClientException(f"{where}: expected one of {', '.join(sorted(known))}, got {value!r}")


def _convert(raw: Any, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ClientException(readable(str(error), where)) from None


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
