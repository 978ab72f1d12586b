"""Which services, on which ports."""

import json
import os
import socket
from pathlib import Path

import msgspec
import pytest

from polar.settings import SettingsError, from_environment
from polar.stack import CONSUMERS, PORT_RANGE, choose_ports, plan, point_latest
from polar.supervisor import ServiceFailed, Supervisor, SupervisorError


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_every_service_is_there_and_comes_after_what_it_needs(tmp_path, model):
    stack = plan({"POLAR_MODEL_DIR": str(model)}, run_dir=tmp_path / "run")
    names = [service.name for service in stack.services]
    assert names == ["kafka", "engine", "admin", "gateway", *CONSUMERS]
    for position, service in enumerate(stack.services):
        assert set(service.needs) <= set(names[:position])
        assert service.name in ("kafka", "engine") or "kafka" in service.needs


def consumers(run_dir, names, **environ) -> Supervisor:
    """Those services alone, as a stack would start them on what exists."""
    stack = plan({"POLAR_ENGINE_URL": "http://127.0.0.1:1", **environ}, run_dir=run_dir)
    own = [msgspec.structs.replace(service, needs=()) for service in stack.services if service.name in names]
    planned = stack.supervisor({**os.environ, **environ})
    return Supervisor(own, run_dir, environment=planned.environment)


@pytest.mark.kafka
def test_every_consumer_says_when_it_is_ready_and_waits_for_no_engine(kafka, tmp_path):
    with consumers(tmp_path, CONSUMERS, POLAR_KAFKA_BOOTSTRAP=kafka) as supervisor:
        supervisor.start()
        assert sum(supervisor.restarts.values()) == 0


def test_a_refusal_to_start_stops_everything_at_once(tmp_path):
    environ = {"PATH": str(tmp_path), "POLAR_KAFKA_BOOTSTRAP": "127.0.0.1:1"}
    with consumers(tmp_path, ["node"], **environ) as supervisor:
        with pytest.raises(ServiceFailed, match=r"node did not start \(exit code 1\)") as failure:
            supervisor.start()
    assert failure.value.log_tail.startswith("node: the local runtime needs bwrap")
    assert "\n" not in failure.value.log_tail


def test_children_read_the_same_settings(tmp_path, model):
    stack = plan({"POLAR_MODEL_DIR": str(model)}, run_dir=tmp_path / "run", learning_rate=0.0, unsafe_local=True)
    assert from_environment(stack.supervisor({}).environment) == stack.settings
    assert stack.settings.learning_rate == 0.0 and stack.settings.unsafe_local
    assert stack.settings.gateway_url == f"http://127.0.0.1:{stack.ports.gateway}"


def test_a_run_folder_keeps_its_ports(tmp_path):
    first = choose_ports(tmp_path, {})
    assert choose_ports(tmp_path, {}) == first
    chosen = [first.admin, first.gateway, first.kafka, first.engine]
    assert len(set(chosen)) == 4 and all(port in PORT_RANGE for port in chosen)
    assert choose_ports(tmp_path, {"POLAR_ADMIN_PORT": str(first.admin + 1)}).admin == first.admin + 1


def test_a_taken_port_is_one_line_that_names_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (tmp_path / "ports.json").write_text(json.dumps({"gateway": port}))
        with pytest.raises(SupervisorError, match=rf"port {port} \(gateway\) is taken: stop what listens there"):
            choose_ports(tmp_path, {})


def test_a_ports_file_that_is_broken_is_named(tmp_path):
    for text in ("{", "[]", '{"admin": "x"}'):
        (tmp_path / "ports.json").write_text(text)
        with pytest.raises(SupervisorError, match=r"cannot read .*ports\.json"):
            choose_ports(tmp_path, {})


def test_what_exists_is_not_started(tmp_path, model):
    environ = {
        "POLAR_MODEL_DIR": str(model),
        "POLAR_KAFKA_BOOTSTRAP": "kafka.example:9092",
        "POLAR_ENGINE_URL": "http://gpu.example:8000",
    }
    stack = plan(environ, run_dir=tmp_path / "run")
    assert [service.name for service in stack.services] == ["admin", "gateway", *CONSUMERS]
    assert stack.settings.kafka_bootstrap == "kafka.example:9092"
    assert stack.settings.engine_url == "http://gpu.example:8000"
    assert all(set(service.needs) <= {"admin", "gateway"} for service in stack.services)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_that_is_not_whole_is_refused_before_anything_is_written(tmp_path, model, missing):
    (model / missing).unlink()
    with pytest.raises(SettingsError, match=f"has no {missing}: set POLAR_MODEL_DIR"):
        plan({"POLAR_MODEL_DIR": str(model)}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_latest_run_is_linked_again_each_time(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name, tmp_path / "runs" / "latest")
        assert (tmp_path / "runs" / "latest").resolve() == tmp_path / name
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["latest"]
