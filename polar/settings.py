"""What every service is told from outside: environment variables named ``POLAR_…``, one per field."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65_535)]
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class SettingsError(ValueError):
    """A variable that cannot be used. The message names it and says what is expected."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Field ``run_dir`` is read from ``POLAR_RUN_DIR``, and so on. Paths are made absolute."""

    run_dir: Path = Path("runs/default")
    kafka_bootstrap: str = "127.0.0.1:9092"
    engine_url: str = "http://127.0.0.1:8000"
    gateway_host: str = "127.0.0.1"
    gateway_port: Port = 8080
    gateway_url: str = "http://127.0.0.1:8080"
    """As a sandbox reaches the gateway."""
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8090
    admin_url: str = "http://127.0.0.1:8090"
    """As the polar command reaches the admin API."""
    admin_key: str | None = None
    session_secret: str | None = None
    """Signs session tokens. Without it, the secret in the run folder is used, and made if missing."""

    history: Literal["exact", "template"] = "exact"
    """exact: a prompt keeps the ids that were sampled for its history; template: it is rendered anew each turn."""
    engine_api: Literal["tokens", "chat"] = "tokens"
    """tokens: vLLM's render, generate, derender; chat: plain Chat Completions with ids (history is the template's)."""
    capture: Literal["on", "off"] = "on"
    """off: the gateway is a plain proxy, nothing is recorded, and nothing can be trained."""
    engine_hold_s: Positive = 60.0
    """How long a call waits for an engine that is away. The least patient agent program gives up after 60 to 120 s."""
    engine_stall_s: Positive = 300.0
    """How long a call waits for the next token of an engine that is there."""

    policy: str = "policy"
    model_dir: Path = Path("examples/tiny_policy/model")
    """The base model: config, tokenizer and model.safetensors."""

    node_id: str = "node-1"
    init_slots: Count = 2
    ready_slots: Count = 4
    run_slots: Count = 4
    postrun_slots: Count = 2
    unsafe_local: bool = False
    node_lease_s: Positive = 15.0

    batch_groups: Count = 4
    staleness_limit: Annotated[int, Meta(ge=0)] = 1
    assembly_grace_s: NotNegative = 5.0
    assembler_id: str = "1"
    """Names this member of the assembler's group; each of several needs its own."""

    learning_rate: NotNegative = 1e-6
    weight_decay: NotNegative = 0.0
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    clip_high: NotNegative = 0.28
    kl_coefficient: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    checkpoints_kept: Count = 3
    seed: int = 0
    trainer_threads: Count = 1
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
            _check(name, given[field.name])
    settings = Settings(**given)
    return msgspec.structs.replace(
        settings, run_dir=settings.run_dir.absolute(), model_dir=settings.model_dir.absolute()
    )


def to_environment(settings: Settings) -> dict[str, str]:
    """The variables that make ``from_environment`` give these settings again."""
    values = msgspec.structs.asdict(settings)
    return {f"POLAR_{name.upper()}": str(value) for name, value in values.items() if value is not None}


def _check(name: str, value: object) -> None:
    """What a type does not say: finite numbers, URLs and addresses whose port can be one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name}={value}: expected a finite number")
    if name.endswith("_URL"):
        _check_address(name, str(value), urlsplit(str(value)).scheme in ("http", "https"), "http://HOST:PORT")
    if name.endswith("_BOOTSTRAP"):
        for address in str(value).split(","):
            _check_address(name, f"//{address.strip()}", True, "HOST:PORT, or several with commas between")


def _check_address(name: str, url: str, scheme_fits: bool, expected: str) -> None:
    try:
        parts = urlsplit(url)
        fits = scheme_fits and bool(parts.hostname) and (parts.port is not None or bool(parts.scheme))
    except ValueError:
        fits = False
    if not fits:
        raise SettingsError(f"{name}={url.removeprefix('//')}: expected {expected}")


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
