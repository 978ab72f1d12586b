"""compose.yaml: it parses, and its services are those that the demo starts, each by the same command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from polar.stack import plan
from polar.supervisor import Service

ROOT = Path(__file__).parents[2]
OTHER_ENGINE = {"engine-gpu"}


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Service]:
    environ = {"POLAR_MODEL_DIR": str(ROOT / "examples/tiny_policy/model")}
    planned = plan(environ, run_dir=tmp_path_factory.mktemp("compose") / "run")
    return {service.name: service for service in planned.services}


def test_its_services_are_those_of_the_demo(compose: dict, services: dict[str, Service]) -> None:
    assert set(compose["services"]) - OTHER_ENGINE == set(services)


def test_each_runs_the_same_module(compose: dict, services: dict[str, Service]) -> None:
    for name, service in compose["services"].items():
        if "command" in service:
            assert shlex.split(service["command"])[:3] == ["python", *services[name.removesuffix("-gpu")].argv[1:3]]


def test_kafka_is_pinned_to_the_version_of_the_jars(compose: dict) -> None:
    image, _, version = compose["services"]["kafka"]["image"].partition(":")
    assert image == "apache/kafka"
    assert f"<version>{version}</version>" in (ROOT / "streams/pom.xml").read_text().replace(
        "${kafka.version}", version
    )


def test_data_lies_on_named_volumes_and_everything_with_a_port_has_a_health_check(compose: dict) -> None:
    assert set(compose["volumes"]) == {"data", "kafka"}
    with_health = {name for name, service in compose["services"].items() if "healthcheck" in service}
    assert with_health == {"kafka", "engine", "engine-gpu", "gateway", "admin"}


def test_the_engine_has_a_profile_for_cpu_and_one_for_gpu(compose: dict) -> None:
    profiles = {name: s["profiles"] for name, s in compose["services"].items() if "profiles" in s}
    assert profiles == {"engine": ["cpu"], "engine-gpu": ["gpu"]}
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text()
