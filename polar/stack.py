"""Which services make a whole system, on which ports, in which order: what ``polar up`` and ``polar demo`` start."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from polar.admin_api import LATEST
from polar.settings import Settings, SettingsError, from_environment, to_environment
from polar.supervisor import READY, Service, Supervisor, SupervisorError

PORT_RANGE = range(20_000, 32_000)
"""Below Linux's ephemeral ports, so that no outgoing connection takes one while its service restarts."""

MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")
CONSUMERS = ("scheduler", "node", "assembler", "batcher", "trainer", "weight_loader")
START_S = 300.0
"""For loading a model, and for reading a long log from its beginning."""


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen once per run folder. None where the service is not ours to start."""

    admin: int
    gateway: int
    kafka: int | None
    engine: int | None


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    services: list[Service]
    ports: Ports

    def supervisor(self, environ: Mapping[str, str]) -> Supervisor:
        """Not started yet. Its children get ``environ`` and these settings."""
        environment = {**environ, **to_environment(self.settings), "PYTHONUNBUFFERED": "1"}
        return Supervisor(self.services, self.settings.run_dir, environment=environment)


def plan(environ: Mapping[str, str], *, run_dir: Path | None = None, **overrides: object) -> Stack:
    """The stack for one run folder. ``POLAR_KAFKA_BOOTSTRAP`` and ``POLAR_ENGINE_URL``, where given, name what exists.

    Raises SettingsError for settings that cannot be used or a model folder that is not whole, SupervisorError for a
    port that is taken.
    """
    settings = from_environment(dict(environ))
    if run_dir is not None:
        settings = msgspec.structs.replace(settings, run_dir=run_dir.absolute())
    settings = msgspec.structs.replace(settings, **overrides)
    check_model(settings.model_dir)
    ports = choose_ports(settings.run_dir, environ)
    settings = msgspec.structs.replace(
        settings,
        kafka_bootstrap=f"127.0.0.1:{ports.kafka}" if ports.kafka else settings.kafka_bootstrap,
        engine_url=f"http://127.0.0.1:{ports.engine}" if ports.engine else settings.engine_url,
        gateway_port=ports.gateway,
        gateway_url=environ.get("POLAR_GATEWAY_URL") or f"http://127.0.0.1:{ports.gateway}",
        admin_port=ports.admin,
        admin_url=f"http://127.0.0.1:{ports.admin}",
    )
    return Stack(settings=settings, services=services(settings, ports), ports=ports)


def services(settings: Settings, ports: Ports) -> list[Service]:
    """In the order of their needs. The admin app makes the topics on a broker that is not ours."""
    python = [sys.executable, "-m"]
    result = []
    if ports.kafka:
        argv = [*python, "streams.broker", "--run-dir", str(settings.run_dir), "--port", str(ports.kafka)]
        result.append(Service(name="kafka", argv=argv, ready_line=settings.kafka_bootstrap, stop_s=20.0))
    if ports.engine:
        url = f"{settings.engine_url}/health"
        result.append(
            Service(name="engine", argv=[*python, "polar.engine"], ready_url=url, ready_s=START_S, stop_s=15.0)
        )
    kafka = ("kafka",) if ports.kafka else ()
    engine = ("engine",) if ports.engine else ()
    admin_url, gateway_url = (f"http://127.0.0.1:{port}/health" for port in (ports.admin, ports.gateway))
    result.append(Service(name="admin", argv=[*python, "gateway_app.admin"], needs=kafka, ready_url=admin_url))
    # Kafka is named again, so that nothing is started again while the broker is away.
    needs = (*kafka, *engine, "admin")
    result.append(Service(name="gateway", argv=[*python, "gateway_app.gateway"], needs=needs, ready_url=gateway_url))
    for name in CONSUMERS:
        needs = (*kafka, "admin", "gateway") if name in ("node", "weight_loader") else (*kafka, "admin")
        argv = [*python, f"consumers.{name}"]
        result.append(Service(name=name, argv=argv, needs=needs, ready_line=READY, ready_s=START_S))
    return result


def check_model(folder: Path) -> None:
    """Raises SettingsError unless the folder holds a whole model."""
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise SettingsError(
                f"{folder} has no {name}: set POLAR_MODEL_DIR to a folder with {', '.join(MODEL_FILES)}"
            )


def choose_ports(run_dir: Path, environ: Mapping[str, str]) -> Ports:
    """Those in ``ports.json``, else free ones, which are written there. ``POLAR_ADMIN_PORT`` and so on go first.

    Raises SupervisorError naming a port that is taken, or a run folder that cannot be written.
    """
    path = run_dir / "ports.json"
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, int | None])
    except FileNotFoundError:
        known = {}
    except (OSError, msgspec.DecodeError) as error:
        raise SupervisorError(f"cannot read {path} ({error}): delete it to choose ports anew") from None
    settings = from_environment(dict(environ))
    chosen: dict[str, int | None] = {
        "admin": settings.admin_port if environ.get("POLAR_ADMIN_PORT") else known.get("admin"),
        "gateway": settings.gateway_port if environ.get("POLAR_GATEWAY_PORT") else known.get("gateway"),
        "kafka": known.get("kafka"),
        "engine": known.get("engine"),
    }
    ours = {name: port if port else free_port() for name, port in chosen.items() if not _exists(name, environ)}
    ports = Ports(**{"kafka": None, "engine": None, **ours})  # type: ignore[arg-type]
    _check_free(ports, path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(ports))
        fresh.replace(path)
    except OSError as error:
        raise SupervisorError(f"cannot write {path} ({error.strerror}): give another --run-dir") from None
    return ports


def _exists(name: str, environ: Mapping[str, str]) -> bool:
    variable = {"kafka": "POLAR_KAFKA_BOOTSTRAP", "engine": "POLAR_ENGINE_URL"}.get(name)
    return bool(variable and environ.get(variable))


def free_port() -> int:
    """A port on which nobody listens now."""
    for _ in range(1000):
        port = random.choice(PORT_RANGE)
        if _is_free(port):
            return port
    raise SupervisorError(f"no free port between {PORT_RANGE.start} and {PORT_RANGE.stop}")


def _check_free(ports: Ports, path: Path) -> None:
    for name, port in msgspec.structs.asdict(ports).items():
        if port is not None and not _is_free(port):
            raise SupervisorError(
                f"port {port} ({name}) is taken: stop what listens there (this run, up already?), or delete {path}"
            )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def point_latest(run_dir: Path, link: Path = LATEST) -> None:
    """Makes ``link`` lead to the run folder: there the polar command looks for the admin API."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.parent / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(run_dir.absolute())
    fresh.replace(link)
