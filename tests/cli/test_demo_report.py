"""The report is one whole file, and the plain line says how it stands."""

import io
import re
from datetime import UTC, datetime, timedelta

from rich.console import Console

from polar.demo.config import DemoConfig
from polar.demo.progress import Progress, Snapshot, plain_line
from polar.demo.report import RunRecords, write_report
from polar.demo.result import DemoResult, Evaluation
from polar.demo.run import summary
from polar.store.rows import BatchRow, LoadRow, NodeStatus, SessionRow, Status, StepRow, WeightRow

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def evaluated(version, passed):
    return Evaluation(version=version, sessions=48, passed=passed, unscored=0, seconds=30.0)


def result(**changes):
    fields = {
        "config": DemoConfig(),
        "run_dir": "runs/<x>",
        "before": evaluated(0, 12),
        "after": evaluated(10, 36),
        "pass_at_1_before": 0.25,
        "pass_at_1_after": 0.75,
        "version": 10,
        "seconds": 432.1,
        "mismatch_engine_trainer": 2e-6,
        "mismatch_captured_recomputed": 1e-5,
        "groups_trained": 40,
        "groups_excluded": {"no_variance": 7},
        "restarts": {"node": 1},
    }
    return DemoResult(**(fields | changes))


def weight(version):
    load = LoadRow(engine_id="e", at=AT, probe_mean_difference=1e-6, probe_max_difference=2e-6, seconds=0.1)
    metrics = {"loss": -0.1, "clip_fraction": 0.0, "logprob_mismatch": 1e-5} if version else {}
    return WeightRow(policy="p", version=version, at=AT, path="/x", sha256="0", metrics=metrics, loads=[load])


def batch(number):
    return BatchRow(
        policy="p",
        batch=number,
        at=AT,
        traces=30,
        trained_tokens=900,
        groups=4,
        sessions=32,
        reward_mean=0.5,
        oldest_version=number - 1,
        newest_version=number - 1,
    )


def session(number):
    fields = dict.fromkeys(SessionRow.__struct_fields__)
    opened = AT + timedelta(seconds=number)
    fields |= {
        "purpose": "train" if number % 2 else "eval",
        "opened_at": opened,
        "closed_at": opened + timedelta(seconds=3),
    }
    return SessionRow(**fields)


def test_the_report_holds_every_chart_and_asks_for_no_other_file(tmp_path):
    records = RunRecords(
        weights=[weight(version) for version in range(3)],
        batches=[batch(number) for number in (1, 2)],
        sessions=[session(number) for number in range(9)],
    )
    page = write_report(tmp_path / "report.html", result(), records).read_text()
    assert page.count("<svg") == page.count("<figcaption>") == 7
    assert "25 % → 75 %" in page and "7 no_variance" in page and "1.00e-05 nats" in page
    assert not re.findall(r"(?:src|href)=\"(?!#)", page) and "<script" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_run_that_measured_nothing_still_has_a_report(tmp_path):
    nothing = Evaluation(version=0, sessions=0, passed=0, unscored=48, seconds=1.0)
    records = RunRecords(weights=[], batches=[], sessions=[])
    empty = result(before=nothing, after=nothing, mismatch_engine_trainer=None, mismatch_captured_recomputed=None)
    assert "– → –" in write_report(tmp_path / "report.html", empty, records).read_text()


def test_the_last_lines_say_what_was_found(tmp_path):
    lines = summary(result(), tmp_path / "report.html")
    assert lines[0] == "held-out pass@1 before  25.0 %  (12 of 48; 95 % interval 15–39 %)"
    assert lines[1].startswith("held-out pass@1 after   75.0 %") and "(+50 points, weight version 10)" in lines[1]
    assert "engine ↔ trainer 2.0e-06, captured ↔ recomputed 1.0e-05" in lines[2]


def status():
    slots = {"init_slots": 2, "ready_slots": 4, "run_slots": 4, "postrun_slots": 2}
    node = NodeStatus(
        node_id="node-1",
        incarnation="i",
        lost=False,
        registered_at=AT,
        heartbeat_at=AT,
        preparing=0,
        ready=3,
        running=4,
        postrun=1,
        **slots,
    )
    return Status(
        nodes=[node],
        ready=3,
        running=4,
        sessions={"running": 4, "usable": 60},
        unusable={},
        groups={"open": 2},
        exclusions={},
        tasks=9,
        cancelled_tasks=0,
        traces=60,
        last_batch=3,
        version_published=2,
        versions_loaded={"engine": 1},
        probe_mean_difference=1e-6,
        probe_max_difference=2e-6,
        step=StepRow(policy="p", version=2, at=AT, metrics={"loss": 0.125, "logprob_mismatch": 3e-5}),
        reward_mean=0.5,
    )


def test_without_a_terminal_the_state_is_one_line():
    assert plain_line(status(), steps=10) == (
        "version 2/10 (loaded 1)  READY 3/4  running 4/4  sessions: 4 running, 60 usable"
        "  reward 0.50  loss 0.1250  mismatch 1e-06 / 3e-05"
    )


def test_on_a_terminal_there_is_one_panel_with_everything():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console, steps=10, began=0.0) as progress:
        progress.phase("training")
        progress.show(Snapshot(status=status(), restarts={"node": 2}))
    shown = console.file.getvalue()
    for words in ("node-1", "READY", "3/4", "4 running, 60 usable", "0.1250", "2 of 10", "2 node", "training"):
        assert words in shown
