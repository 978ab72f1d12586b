"""What every service is told from outside: environment variables named ``POLAR_…``, one per field."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class SettingsError(ValueError):
    """A variable that cannot be used. The message names it and says what is expected."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Field ``run_dir`` is read from ``POLAR_RUN_DIR``, and so on. Paths are made absolute."""

    run_dir: Path = Path("runs/default")
    kafka_bootstrap: str = "127.0.0.1:9092"
    engine_url: str = "http://127.0.0.1:8000"
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 8080
    gateway_url: str = "http://127.0.0.1:8080"
    """As a sandbox reaches the gateway."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 8090
    admin_url: str = "http://127.0.0.1:8090"
    """As the polar command reaches the admin API."""
    admin_key: str | None = None
    session_secret: str | None = None
    """Signs session tokens. Without it, the secret in the run folder is used, and made if missing."""

    policy: str = "policy"
    model_dir: Path = Path("examples/tiny_policy/model")
    """The base model: config, tokenizer and model.safetensors."""

    node_id: str = "node-1"
    init_slots: int = 2
    ready_slots: int = 4
    run_slots: int = 4
    postrun_slots: int = 2
    unsafe_local: bool = False
    node_lease_s: float = 15.0

    batch_groups: int = 4
    staleness_limit: int = 1
    assembly_grace_s: float = 5.0
    assembler_id: str = "1"
    """Names this member of the assembler's group; each of several needs its own."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0
    max_grad_norm: float = 1.0
    checkpoints_kept: int = 3
    seed: int = 0
    trainer_threads: int = 1
    device: str = "auto"


def from_environment(environ: dict[str, str] | None = None) -> Settings:
    """Reads ``POLAR_*``. Raises SettingsError naming the variable that is wrong."""
    environ = dict(os.environ) if environ is None else environ
    given = {}
    for field in msgspec.structs.fields(Settings):
        name = f"POLAR_{field.name.upper()}"
        if (text := environ.get(name)) not in (None, ""):
            try:
                given[field.name] = msgspec.convert(text, field.type, strict=False, dec_hook=_path)
            except msgspec.ValidationError as error:
                raise SettingsError(f"{name}={text!r}: {error}") from None
    settings = Settings(**given)
    return msgspec.structs.replace(
        settings, run_dir=settings.run_dir.absolute(), model_dir=settings.model_dir.absolute()
    )


def to_environment(settings: Settings) -> dict[str, str]:
    """The variables that make ``from_environment`` give these settings again."""
    values = msgspec.structs.asdict(settings)
    return {f"POLAR_{name.upper()}": str(value) for name, value in values.items() if value is not None}


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
