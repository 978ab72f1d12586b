"""The demo run: what it refuses, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from polar.demo.config import DemoConfig, DemoError
from polar.demo.progress import Progress
from polar.demo.run import _Run
from polar.store.rows import TaskRow, WeightRow
from schemas.ids import derived_id

ROOT = Path(__file__).resolve().parents[2]
AT = datetime(2026, 1, 1, tzinfo=UTC)


class Admin:
    """An admin API in front of a broker with these tasks and versions."""

    def __init__(self, task_ids=(), versions=()):
        rows = dict.fromkeys(TaskRow.__struct_fields__, None)
        self._answers = {
            "/admin/topics": [{"topic": "polar.tasks", "partitions": [{"end": len(task_ids)}]}],
            "/admin/tasks": [TaskRow(**{**rows, "task_id": task_id}) for task_id in task_ids],
            "/admin/weights": [
                WeightRow(policy="policy", version=version, at=AT, path="", sha256="", metrics={}, loads=[])
                for version in versions
            ],
        }

    def get(self, path, kind, **query):
        return self._answers.get(path)


class Services:
    environment = {"POLAR_POLICY": "policy"}
    restarts = {}

    def poll(self):
        pass


def check(folder, **held):
    with Progress(Console(file=io.StringIO()), steps=1, began=0.0) as progress:
        progress.show = lambda snapshot: None
        run = _Run(DemoConfig(), folder, Services(), Admin(**held), progress)
        run._until = lambda condition, stalled: condition(None) or pytest.fail(stalled)
        run._check_broker()


def test_a_broker_with_another_run_on_it_is_refused(tmp_path):
    for held in ({"task_ids": ["foreign"]}, {"versions": [0, 1]}):
        with pytest.raises(DemoError, match="of another run: give that run's --run-dir"):
            check(tmp_path, **held)


def test_a_fresh_broker_and_the_own_one_are_taken(tmp_path):
    check(tmp_path, versions=[0])
    own = derived_id("demo", str(tmp_path), "before", 0)
    check(tmp_path, task_ids=["of training", own], versions=[0, 1])


DEMO = """
import sys
from pathlib import Path
import polar.stack
from polar.cli import main
from polar.supervisor import Service
code = "import time; print('up', flush=True); time.sleep(600)"
argv = [sys.executable, "-c", code]
polar.stack.services = lambda settings, ports: [
    Service(name="quick", argv=argv, ready_line="up"),
    Service(name="slow", argv=argv, ready_line="never", needs=("quick",)),
]
main(["demo", "--run-dir", sys.argv[1]])
"""
"""The command on two trivial services, of which one never gets ready."""


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_services_and_keeps_the_data(tmp_path, number):
    run_dir = tmp_path / "run"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    environ |= {"PYTHONPATH": str(ROOT), "POLAR_MODEL_DIR": str(ROOT / "examples" / "tiny_policy" / "model")}
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(run_dir)], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    slow, deadline = run_dir / "pids" / "slow.pid", time.monotonic() + 60
    try:
        while not slow.exists():
            assert demo.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in (run_dir / "pids").glob("*.pid")]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        demo.send_signal(number)
        out, _ = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert demo.returncode == 130
    assert f"stopped; the data stays in {run_dir}" in out.replace("\n", " ")
    assert not any(is_alive(pid) for pid in pids)
    assert (run_dir / "ports.json").exists() and (run_dir / "logs" / "quick.log").read_text() == "up\n"
