"""The command evaluator in a real sandbox: rewards, and what is an evaluator's own failure."""

from __future__ import annotations

import math
import os

import pytest

from polar.evaluators.command import RewardFileError, evaluate, read_reward
from polar.evaluators.evaluator import Score
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import Program
from schemas.tasks import EvaluatorSpec, Limits, RuntimeSpec


@pytest.fixture
async def sandbox(tmp_path):
    sandbox = await LocalRuntime(tmp_path / "sessions", hidden=[]).create(
        "s", RuntimeSpec(limits=Limits(memory_mb=256))
    )
    yield sandbox
    await sandbox.close()


async def score(sandbox, command, reward_file=None, deadline_s=20.0, **environment):
    spec = EvaluatorSpec(command=command, reward_file=reward_file)
    return await evaluate(spec, sandbox, environment, deadline_s)


async def agent(sandbox, command):
    assert (await sandbox.run(Program(argv=["bash", "-c", command]), 20)).exit_code == 0


async def test_the_exit_code_is_the_reward(sandbox):
    await agent(sandbox, "echo hi > a.txt")
    right = await score(sandbox, 'grep -qx "$WANTED" a.txt', WANTED="hi")
    wrong = await score(sandbox, "grep -qx ho a.txt; false | true")
    assert (right.reward, right.error, right.detail["exit_code"]) == (1.0, None, 0)
    assert (wrong.reward, wrong.error, wrong.detail["exit_code"]) == (0.0, None, 1), "pipefail"


async def test_a_reward_file_wins_over_the_exit_code(sandbox):
    assert (await score(sandbox, "echo ' 0.25 ' > out/r; exit 7", "out/r")).error is not None
    assert (await score(sandbox, "mkdir out; echo ' -0.25 ' > out/r; exit 7", "out/r")).reward == -0.25


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "", "good", "1 2", "0x1", "9" * 400])
async def test_a_reward_that_is_no_finite_number_is_an_error(sandbox, text):
    result = await score(sandbox, f"printf '{text}' > r", "r")
    assert result.reward is None and result.error.startswith("evaluator.reward_file: r ")


async def test_a_reward_file_of_the_agent_is_not_believed(sandbox):
    await agent(sandbox, "echo 1 > r")
    result = await score(sandbox, "true", "r")
    assert result.reward is None and "No such file" in result.error
    await agent(sandbox, "mkdir r; touch r/x; chmod 000 r || true; chmod 755 r")
    assert (await score(sandbox, "echo 0.5 > r", "r")).reward == 0.5


async def test_a_deadline_or_memory_limit_is_an_error(sandbox):
    slow = await score(sandbox, "sleep 60", deadline_s=0.3)
    assert slow.reward is None and "deadline" in slow.error
    hog = "import mmap\nm = mmap.mmap(-1, 600 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1"
    big = await score(sandbox, f'python3 -c "{hog}"; sleep 60')
    assert big.reward is None and "memory" in big.error


async def test_the_agents_home_does_not_reach_the_evaluator(sandbox):
    await agent(sandbox, "mkdir -p ~/bin; echo hint > ~/hint; (sleep 60 &)")
    assert (await score(sandbox, "test -e ~/hint || ps aux | grep -q '[s]leep 60'")).reward == 0.0


async def test_no_link_leads_out_of_the_work_folder(sandbox, tmp_path):
    (tmp_path / "secret").write_text("0.75")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "r").write_text("0.75")
    (sandbox.work / "file").symlink_to(tmp_path / "secret")
    (sandbox.work / "folder").symlink_to(outside)
    os.mkfifo(sandbox.work / "fifo")
    (sandbox.work / "directory").mkdir()
    for name in ("file", "folder/r", "fifo", "directory", "missing/r"):
        with pytest.raises(RewardFileError):
            read_reward(sandbox.work, name)
    for name in ("/etc/hostname", "../secret", "a/../../secret", "", "x" * 256, "a/" * 600):
        result = await score(sandbox, "true", name)
        assert result.reward is None and "relative path" in result.error


async def test_a_path_that_the_disk_refuses_is_an_error(sandbox, monkeypatch):
    monkeypatch.setattr("polar.evaluators.command.wrong_path", lambda name: False)
    result = await score(sandbox, "true", "x" * 256)
    assert result.reward is None and "cannot be looked at: File name too long" in result.error


def test_a_score_is_a_finite_reward_or_an_error():
    for wrong in ({"reward": None}, {"reward": 1.0, "error": "both"}, {"reward": math.nan}, {"reward": math.inf}):
        with pytest.raises(ValueError):
            Score(**wrong)
