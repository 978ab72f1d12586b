"""The weight loader: keeps one engine on the newest published weights, and proves each load.

- It follows ``polar.weights`` from the beginning at each start; the newest version wins, and those between are skipped.
- The files are checked against their SHA-256 before the engine is touched: a bad folder would kill it.
- Requests in flight are held while weights are loaded, and go on. After each load the engine's log-probs of the
  published probe are compared with the trainer's; the result is published as ``weights.loaded``.
- Every few seconds the engine is asked for its label, so an engine that was restarted gets the newest weights again,
  and one that a killed loader left paused goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import time
from pathlib import Path

import numpy as np

from consumers.process import run_process, say_ready
from polar.engine.client import EngineClient, EngineError
from polar.settings import Settings
from schemas.packed import unpack_ids, unpack_logprobs
from schemas.weights import WeightsLoaded, WeightsPublished
from streams.consumer import Reader, Received
from streams.producer import Producer
from streams.topics import WEIGHTS

SOURCE = "weight-loader"
CHECK_S = 2.0
MISMATCH = 1e-3
"""Nats, on average over the probe. More means that engine and trainer do not compute the same policy."""

log = logging.getLogger(__name__)


class WeightsRefused(Exception):
    """Published files that are missing or are not what was published."""


class WeightLoader:
    """Brings one engine to what is published. ``ensure`` may be called at any time, as often as one likes."""

    def __init__(self, engine: EngineClient, producer: Producer) -> None:
        self._engine = engine
        self._producer = producer
        self._proven: int | None = None
        self._complained: str | None = None

    async def ensure(self, published: WeightsPublished) -> None:
        """The engine samples from ``published`` afterwards, or the log says why not. Raises KafkaUnavailable."""
        try:
            if not await self._engine.healthy():
                self._complain(f"the engine at {self._engine.url} is not up; waiting for it")
                return
            if await self._engine.paused():
                await self._engine.resume()
            if not await self._current(published.version):
                await self._load(published)
            elif self._proven != published.version:
                await self._prove(published, 0.0)
        except (EngineError, WeightsRefused) as error:
            self._complain(f"version {published.version} is not loaded: {error}")

    async def _current(self, version: int) -> bool:
        """Whether the engine's label is ``version``; one without a label samples from the base model, version 0."""
        label = await self._engine.weight_version()
        if label == "default":
            await self._engine.set_weight_version(0)
            label = "0"
        return label == str(version)

    async def _load(self, published: WeightsPublished) -> None:
        await asyncio.to_thread(check_files, published)
        started = time.monotonic()
        await self._engine.load_weights(published.path, published.version)
        await self._prove(published, time.monotonic() - started)

    async def _prove(self, published: WeightsPublished, seconds: float) -> None:
        """Compares log-probs over the probe, shouts where they differ, and publishes the result."""
        ids = unpack_ids(published.probe.prompt_ids).tolist()
        difference = np.abs(await self._engine.probe_logprobs(ids) - unpack_logprobs(published.probe.logprobs))
        mean, most = float(difference.mean()), float(difference.max())
        self._proven, self._complained = published.version, None
        if not mean <= MISMATCH:
            log.error(
                "VERSION %d IS NOT WHAT THE TRAINER HAS: log-probs differ by %.2g on average (limit %.0e)",
                *(published.version, mean, MISMATCH),
            )
        else:
            log.info("version %d loaded in %.2f s; log-probs differ by %.1g", published.version, seconds, mean)
        loaded = WeightsLoaded(
            policy=published.policy,
            version=published.version,
            engine_id=self._engine.url,
            probe_mean_difference=mean,
            probe_max_difference=most,
            seconds=seconds,
        )
        await self._producer.send(WEIGHTS, loaded)

    def _complain(self, message: str) -> None:
        """Once, though it is tried again and again."""
        if message != self._complained:
            log.error("%s", message)
        self._complained = message


def check_files(published: WeightsPublished) -> None:
    """Raises WeightsRefused unless the folder has a config and the very weights that were published."""
    folder = Path(published.path)
    weights = folder / "model.safetensors"
    for file in (folder / "config.json", weights):
        if not file.is_file():
            raise WeightsRefused(f"{file} is missing")
    with weights.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != published.sha256:
        raise WeightsRefused(f"{weights} has SHA-256 {found[:12]}…, not {published.sha256[:12]}… as published")


def newest(known: WeightsPublished | None, received: list[Received], policy: str) -> WeightsPublished | None:
    """The published record of ``policy`` with the highest version; of equal versions, the last."""
    for record in (one.record for one in received):
        if isinstance(record, WeightsPublished) and record.policy == policy:
            known = record if known is None or record.version >= known.version else known
    return known


async def run(settings: Settings, stop: asyncio.Event) -> None:
    async with (
        EngineClient(settings.engine_url) as engine,
        Producer(settings.kafka_bootstrap, source=SOURCE) as producer,
        Reader(settings.kafka_bootstrap, [WEIGHTS], source=SOURCE, start="beginning") as reader,
    ):
        loader = WeightLoader(engine, producer)
        published = newest(None, await reader.read_to_end(), settings.policy)
        say_ready()
        while not stop.is_set():
            if published is not None:
                await loader.ensure(published)
            published = newest(published, await reader.poll(CHECK_S), settings.policy)


if __name__ == "__main__":
    sys.exit(run_process(SOURCE, run))
