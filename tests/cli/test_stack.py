"""Which services, on which ports."""

import json
import socket
from pathlib import Path

import pytest

from polar.settings import SettingsError, from_environment
from polar.stack import CONSUMERS, PORT_RANGE, choose_ports, plan, point_latest
from polar.supervisor import SupervisorError


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
