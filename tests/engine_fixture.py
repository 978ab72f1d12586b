"""The fixture ``engine``: real vLLM on a tiny random model, started by the project's own launcher, once a session.

With POLAR_TEST_ENGINE_URL it is an engine that runs already, on a model built by ``tiny_model`` with seed 0.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tiny_model import build_model

from polar.engine.client import EngineClient

START_S = 240.0


class RunningEngine(msgspec.Struct, frozen=True):
    """``model`` is what it was started on (version 0 until a test loads weights); ``other`` has the same shape."""

    url: str
    model: Path
    other: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def wait_up(url: str) -> None:
    async with EngineClient(url) as client:
        await client.wait_healthy(START_S)
        async with asyncio.timeout(30):
            while await client.weight_version() == "default":
                await asyncio.sleep(0.2)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("engine")
    given = os.environ.get("POLAR_TEST_ENGINE_URL")
    url = given or f"http://127.0.0.1:{free_port()}"
    running = RunningEngine(url, build_model(folder / "model", seed=0), build_model(folder / "other", seed=1))
    if given:
        yield running
        return
    with engine_process(folder, running.model, url):
        yield running


@contextmanager
def engine_process(folder: Path, model: Path, url: str) -> Iterator[None]:
    """Real vLLM on ``model``, by the project's own launcher; its log is in ``folder``."""
    settings = {"POLAR_MODEL_DIR": str(model), "POLAR_ENGINE_URL": url, "POLAR_RUN_DIR": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "polar.engine"], env=os.environ | settings, stdout=log, stderr=log
        )
    try:
        asyncio.run(wait_up(url))
        yield
    finally:
        process.terminate()
        process.wait(30)
