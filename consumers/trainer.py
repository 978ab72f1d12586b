"""The GRPO trainer: batches in, in order, weight versions out.

Batch k is read whole (its seal included), trained, checkpointed with the offset after its seal, and then published as
version k. The position in ``polar.batches`` lives in the checkpoint alone. Publishing is transactional, so that a
killed trainer's half-sent record cannot appear after its successor has looked at what was published.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from consumers.process import run_process, say_ready
from polar.grpo.batch import BatchAssembly
from polar.grpo.errors import TrainingError
from polar.grpo.trainer import GrpoTrainer, must_publish
from polar.settings import Settings
from schemas.weights import WeightsPublished
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import BATCHES, WEIGHTS

SOURCE = "polar-trainer"
POLL_S = 0.5

log = logging.getLogger("trainer")


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Trains until ``stop`` is set; a step in hand is ended first. Raises TrainingError or StreamError."""
    with GrpoTrainer(settings) as trainer:
        identity = f"{SOURCE}-{settings.policy}"
        async with Producer(settings.kafka_bootstrap, source=SOURCE, transactional_id=identity) as producer:
            current = trainer.announcement()
            if must_publish(current, await _last_published(settings)):
                await _publish(producer, current)
            log.info("stands at version %d, %s", trainer.version, current.path)
            await _train(settings, stop, trainer, producer)


async def _train(settings: Settings, stop: asyncio.Event, trainer: GrpoTrainer, producer: Producer) -> None:
    start = {} if trainer.next_offset is None else {(BATCHES, 0): trainer.next_offset}
    assembly = BatchAssembly(settings.policy, trainer.version + 1)
    async with Reader(settings.kafka_bootstrap, [BATCHES], source=SOURCE, start=start) as reader:
        say_ready()
        while not stop.is_set():
            for received in await reader.poll(POLL_S):
                if (batch := assembly.add(received.record)) is None:
                    continue
                # In a thread, so that the connections to Kafka are served during a step.
                published = await asyncio.to_thread(trainer.train, batch, received.offset + 1)
                await _publish(producer, published)
                log.info("version %d: %s", published.version, _summary(published.metrics))
                if stop.is_set():
                    return


async def _last_published(settings: Settings) -> WeightsPublished | None:
    async with Reader(settings.kafka_bootstrap, [WEIGHTS], source=SOURCE) as reader:
        records = [received.record for received in await reader.read_to_end()]
    ours = [r for r in records if isinstance(r, WeightsPublished) and r.policy == settings.policy]
    return ours[-1] if ours else None


async def _publish(producer: Producer, published: WeightsPublished) -> None:
    async with producer.transaction():
        await producer.send(WEIGHTS, published)


def _summary(metrics: dict[str, float]) -> str:
    shown = ("reward_mean", "loss", "kl", "entropy", "grad_norm", "clip_fraction", "logprob_mismatch", "staleness_mean")
    figures = [f"{name} {metrics[name]:.4g}" for name in shown if name in metrics]
    return ", ".join([*figures, f"{metrics['tokens']:.0f} tokens in {metrics['seconds']:.1f} s"])


def main() -> int:
    """The service. Exit status 1, after one line that says why, when it cannot go on."""
    return run_process(SOURCE, run, (TrainingError,))


if __name__ == "__main__":
    sys.exit(main())
