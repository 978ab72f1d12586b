"""What the demo reports."""

import json
import math
import os
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import demo as benchmark
from polar.demo.config import DemoConfig
from polar.demo.result import DemoResult, Evaluation, evaluation, wilson, write_result

EMPTY = evaluation([], version=0, seconds=1.0)
UNSCORED = DemoResult(
    config=DemoConfig(),
    run_dir="/run",
    before=EMPTY,
    after=EMPTY,
    pass_at_1_before=math.nan,
    pass_at_1_after=math.nan,
    version=0,
    seconds=1.0,
    mismatch_engine_trainer=None,
    mismatch_captured_recomputed=None,
    groups_trained=0,
    groups_excluded={},
    restarts={},
)


def member(reward, usable=True):
    return {"session_id": "s", "attempt": 1, "usable": usable, "reward": reward, "traces": 1, "reason": ""}


def test_sessions_without_a_fair_score_count_for_nothing():
    members = [
        member(1.0),
        member(1.0),
        member(0.5),
        member(0.0),
        member(None, usable=False),
        member(1.0, usable=False),
    ]
    found = evaluation(members, version=3, seconds=1.0)
    assert (found.sessions, found.passed, found.unscored) == (4, 2, 2)
    assert found.pass_at_1 == 0.5


def test_without_a_scored_session_there_is_no_share():
    found = evaluation([], version=0, seconds=1.0)
    assert math.isnan(found.pass_at_1) and found.interval == (0.0, 1.0)


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    # Newcombe 1998, table I: Wilson's score interval without continuity correction.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_agrees_with_published_intervals(passed, n, low, high):
    assert wilson(passed, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share(counts):
    passed, n = counts
    low, high = Evaluation(version=0, sessions=n, passed=passed, unscored=0, seconds=0.0).interval
    assert 0.0 <= low <= passed / n <= high <= 1.0


def test_a_result_replaces_the_former_one_whole(tmp_path):
    (tmp_path / "result.json").write_text("former")
    os.link(tmp_path / "result.json", tmp_path / "open")
    write_result(tmp_path / "result.json", UNSCORED)
    assert (tmp_path / "open").read_text() == "former"
    assert json.loads((tmp_path / "result.json").read_text())["pass_at_1_before"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["open", "result.json"]


def bench(monkeypatch, capsys, run_demo, *arguments):
    monkeypatch.setattr(benchmark, "run_demo", run_demo)
    monkeypatch.setattr(sys, "argv", ["demo", "--json", *arguments])
    code = benchmark.main()
    return code, *capsys.readouterr()


def test_the_benchmark_writes_strict_json_and_runs_each_in_a_folder_of_its_own(monkeypatch, capsys, tmp_path):
    folders = []

    def run_demo(config, folder, console):
        folders.append(folder)
        return msgspec.structs.replace(UNSCORED, config=config)

    arguments = ["--seeds", "2", "--learning-rate", "0", "--run-dir", str(tmp_path)]
    code, out, _ = bench(monkeypatch, capsys, run_demo, *arguments)
    assert code == 0 and "NaN" not in out
    assert json.loads(out)["before"] == [None, None] and json.loads(out)["pass_at_1_after"] is None
    assert folders == [tmp_path / name for name in ("seed-0", "seed-1", "control")]


def test_a_disk_that_refuses_ends_the_benchmark_with_one_line(monkeypatch, capsys, tmp_path):
    def run_demo(config, folder, console):
        raise OSError(28, "No space left on device", str(folder))

    code, out, err = bench(monkeypatch, capsys, run_demo, "--run-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"error: {tmp_path / 'seed-0'}: No space left on device"
