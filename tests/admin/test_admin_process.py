"""``python -m gateway_app.admin``: what a user did wrong is one line and exit code 1."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import duckdb
import pytest


def admin(run_dir, **environment):
    settings = {f"POLAR_{name.upper()}": str(value) for name, value in environment.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "gateway_app.admin"],
        env={**os.environ, "POLAR_RUN_DIR": str(run_dir), **settings},
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def refused(process):
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if "ERROR" in line]


def test_a_taken_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (line,) = refused(admin(tmp_path, admin_port=port))
    assert f"cannot listen at 127.0.0.1:{port}" in line


def test_an_open_address_without_a_key(tmp_path):
    (line,) = refused(admin(tmp_path, admin_host="0.0.0.0"))
    assert "set POLAR_ADMIN_KEY" in line


def test_a_setting_that_is_no_number(tmp_path):
    (line,) = refused(admin(tmp_path, admin_port="many"))
    assert "POLAR_ADMIN_PORT='many'" in line


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    lines = refused(admin(tmp_path / "file" / "run", admin_port=free_port(), kafka_bootstrap="127.0.0.1:1"))
    assert any("choose another run folder" in line for line in lines)


def test_a_database_that_another_process_holds(kafka, tmp_path):
    with duckdb.connect(str(tmp_path / "polar.duckdb")):
        lines = refused(admin(tmp_path, admin_port=free_port(), kafka_bootstrap=kafka))
    assert any("polar.duckdb" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(kafka, tmp_path, number):
    port = free_port()
    process = admin(tmp_path, admin_port=port, kafka_bootstrap=kafka)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 0, stderr
    finally:
        process.kill()
        process.wait()


def wait_for(url, process, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"no answer from {url}")
