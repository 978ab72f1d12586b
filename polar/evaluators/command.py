"""Scores by a command in the sandbox: exit code 0 is reward 1, any other 0, or the number in ``reward_file``.

The command gets an empty home, so that nothing which the agent left in its own can change it. A reward file wins over
the exit code, and has to be one finite number in a regular file inside the work folder; one that the agent left there
is removed first.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from polar.evaluators.evaluator import Score
from polar.runtimes.names import INSIDE, wrong_path
from polar.runtimes.runtime import Program, Sandbox
from schemas.tasks import EvaluatorSpec

REWARD_FILE_BYTES = 256
"""A number needs no more."""


class RewardFileError(Exception):
    """There is no finite number to be read. One line."""


async def evaluate(spec: EvaluatorSpec, sandbox: Sandbox, environment: dict[str, str], deadline_s: float) -> Score:
    """See ``evaluator.Evaluator``."""
    if spec.reward_file is not None and (refused := await _cleared(spec.reward_file, sandbox, deadline_s)):
        return refused
    program = Program(argv=["bash", "-o", "pipefail", "-c", spec.command], environment=environment, fresh_home=True)
    ended = await sandbox.run(program, deadline_s)
    detail: dict[str, Any] = {"exit_code": ended.exit_code, "seconds": round(ended.seconds, 3)}
    detail |= {name: text for name, text in (("stdout", ended.stdout), ("stderr", ended.stderr)) if text}
    if ended.exit_code is None:
        return Score(reward=None, error=f"evaluator.command: {ended.reason}", detail=detail)
    if spec.reward_file is None:
        return Score(reward=1.0 if ended.exit_code == 0 else 0.0, detail=detail)
    try:
        return Score(reward=read_reward(sandbox.work, spec.reward_file), detail=detail)
    except RewardFileError as error:
        return Score(reward=None, error=f"evaluator.reward_file: {error}", detail=detail)


async def _cleared(name: str, sandbox: Sandbox, deadline_s: float) -> Score | None:
    """Removes what the agent left at ``name``. Returns the score when that cannot be done."""
    if wrong_path(name):
        return Score(reward=None, error=f"evaluator.reward_file: {name!r} must be {INSIDE}")
    try:
        left = _left_over(sandbox.work / name)
    except OSError as error:
        return Score(reward=None, error=f"evaluator.reward_file: {name} cannot be looked at: {error.strerror}")
    if left:
        remove = Program(argv=["rm", "-rf", "--", name], fresh_home=True)
        if (await sandbox.run(remove, deadline_s)).exit_code != 0:
            return Score(reward=0.0, detail={"agent": f"left a {name} that cannot be removed"})
    return None


def _left_over(path: Path) -> bool:
    try:
        return path.is_symlink() or path.exists()
    except PermissionError:
        return True


def read_reward(work: Path, name: str) -> float:
    """The finite number in ``work/name``, a path that stays inside. Raises RewardFileError.

    No symbolic link is followed, of the file or of a folder on the way: the agent may have made them, and this
    process can read more than the sandbox can.
    """
    try:
        text = _read_inside(work, PurePosixPath(name).parts)
    except OSError as error:
        raise RewardFileError(f"{name} cannot be read: {error.strerror}") from None
    try:
        reward = float(text)
    except ValueError:
        raise RewardFileError(f"{name} holds {text[:40]!r}, which is not one number") from None
    if not math.isfinite(reward):
        raise RewardFileError(f"{name} holds {text.strip()}, which is not finite")
    return reward


def _read_inside(work: Path, parts: tuple[str, ...]) -> str:
    folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise RewardFileError(f"{'/'.join(parts)} is not a regular file")
        content = os.read(file, REWARD_FILE_BYTES + 1)
    finally:
        os.close(file)
    if len(content) > REWARD_FILE_BYTES:
        raise RewardFileError(f"{'/'.join(parts)} is larger than a number ({REWARD_FILE_BYTES} bytes)")
    return content.decode("utf-8", "replace")
