"""Settings from the environment: what is right comes back as it was, what is wrong is named in one line."""

from __future__ import annotations

import os

import pytest

from polar.cli import main
from polar.cli import run as run_command
from polar.settings import SettingsError, from_environment, to_environment


def test_what_is_written_is_read_again() -> None:
    given = {"POLAR_KAFKA_BOOTSTRAP": "kafka:9092,other:1", "POLAR_ENGINE_URL": "http://engine:8000", "POLAR_SEED": "7"}
    settings = from_environment(given)
    assert (settings.kafka_bootstrap, settings.seed) == ("kafka:9092,other:1", 7)
    assert from_environment(to_environment(settings)) == settings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("POLAR_ADMIN_PORT", "70000"),
        ("POLAR_BATCH_GROUPS", "0"),
        ("POLAR_CLIP_LOW", "nan"),
        ("POLAR_ENGINE_URL", "http://h:99999"),
        ("POLAR_ENGINE_URL", "h:1"),
        ("POLAR_KAFKA_BOOTSTRAP", "host"),
        ("POLAR_KAFKA_BOOTSTRAP", "host:abc"),
        ("POLAR_LEARNING_RATE", "-1"),
        ("POLAR_MAX_GRAD_NORM", "inf"),
        ("POLAR_RUN_SLOTS", "many"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}="):
        from_environment({name: text})


@pytest.mark.parametrize(("options", "expected"), [([], False), (["--unsafe-local"], True)])
def test_agents_run_unconfined_only_when_told_so(
    options: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def planned(environ: dict[str, str], **_: object) -> None:
        seen.append(from_environment(dict(environ)).unsafe_local)
        raise SettingsError("enough")

    monkeypatch.setattr(run_command, "plan", planned)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as ended:
        main(["up", *options])
    assert (seen, ended.value.code) == ([expected], 1)
