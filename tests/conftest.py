"""Fixtures that every room's tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from streams.broker import LocalBroker

pytest_plugins = ["engine_fixture"]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap address of a fresh local broker with all topics, or POLAR_KAFKA_BOOTSTRAP where that is set."""
    if given := os.environ.get("POLAR_KAFKA_BOOTSTRAP"):
        yield given
        return
    with LocalBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.bootstrap
