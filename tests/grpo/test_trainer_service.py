"""The trainer as a process on a real broker: killed at the worst moments, it publishes what an undisturbed one does."""

import asyncio
import math
import multiprocessing
import os
import signal
import sys

import msgspec
import pytest
import torch
from grpo_material import VOCABULARY, batch_records, make_policy_folder, random_traces, settings_for
from safetensors.torch import load_file, save_file

import consumers.trainer as service
from polar.grpo import checkpoint
from polar.grpo import trainer as training
from polar.grpo.errors import BatchError, NonFiniteStep
from polar.grpo.model import probe_ids
from polar.settings import to_environment
from schemas.weights import WeightsPublished
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import BATCHES, WEIGHTS

pytestmark = pytest.mark.kafka

STEPS = 6
PROCESSES = multiprocessing.get_context("forkserver")  # each trainer starts without importing torch again
PROCESSES.set_forkserver_preload(["consumers.trainer", "transformers.models.qwen3.modeling_qwen3"])


@pytest.fixture(autouse=True)
def _nondeterminism_allowed_afterwards():
    yield
    torch.use_deterministic_algorithms(False)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_step(version):
    step = training.train_step
    training.train_step = lambda model, optimizer, batch, *rest: (
        die() if batch.number == version else step(model, optimizer, batch, *rest)
    )


def after_the_step(version):
    save = checkpoint.save
    checkpoint.save = lambda *a, **k: die() if k["version"] == version else save(*a, **k)


def while_the_checkpoint_is_written(version):
    sync_tree = checkpoint._sync_tree
    checkpoint._sync_tree = lambda folder: die() if folder.name.endswith(f"v{version}") else sync_tree(folder)


def between_checkpoint_and_publication(version):
    publish = service._publish

    async def publish_or_die(producer, published):
        return die() if published.version == version else await publish(producer, published)

    service._publish = publish_or_die


def within_the_publication(version):
    send = Producer.send

    async def send_then_die(self, topic, record):
        await send(self, topic, record)
        if record.version == version:
            die()

    Producer.send = send_then_die


def after_the_publication(version):
    summary = service._summary
    service._summary = lambda metrics: die() if metrics["sessions"] == 4 + version else summary(metrics)


KILLS = [
    (before_the_step, 1),
    (after_the_step, 2),
    (while_the_checkpoint_is_written, 2),
    (between_checkpoint_and_publication, 3),
    (within_the_publication, 4),
    (after_the_publication, 5),
]


def trainer_process(settings, sabotage=None, version=0):
    os.environ.update(to_environment(settings))
    if sabotage is not None:
        sabotage(version)
    sys.exit(service.main())


def start(settings, *sabotage):
    process = PROCESSES.Process(target=trainer_process, args=(settings, *sabotage))
    process.start()
    return process


async def ended(process):
    async with asyncio.timeout(120):
        await asyncio.to_thread(process.join)
    return process.exitcode


async def write_batches(kafka, policy, numbers):
    async with Producer(kafka, source="test", transactional_id=f"test-{policy}") as producer:
        for number in numbers:
            async with producer.transaction():
                for record in batch_records(number, random_traces(number, groups=1, samples=4 + number)):
                    await producer.send(BATCHES, msgspec.structs.replace(record, policy=policy))


async def published(kafka, policy, *, until=None):
    """What ``policy`` has on polar.weights, now or when version ``until`` is there."""
    found = []
    async with Reader(kafka, [WEIGHTS], source="test") as reader, asyncio.timeout(120):
        records = await reader.read_to_end()
        while True:
            found += [r.record for r in records if isinstance(r.record, WeightsPublished) and r.record.policy == policy]
            if until is None or (found and found[-1].version >= until):
                return found
            records = await reader.poll(1.0)


async def train_to_the_end(kafka, settings):
    process = start(settings)
    found = await published(kafka, settings.policy, until=STEPS)
    os.kill(process.pid, signal.SIGTERM)
    assert await ended(process) == 0
    return found


async def test_killed_at_any_moment_it_publishes_what_an_undisturbed_run_does(kafka, tmp_path):
    model_dir = make_policy_folder(tmp_path / "model")
    calm = settings_for(tmp_path / "run", model_dir, policy="calm", kafka_bootstrap=kafka)
    killed = settings_for(tmp_path / "run", model_dir, policy="killed", kafka_bootstrap=kafka)
    for policy in ("calm", "killed"):
        await write_batches(kafka, policy, range(1, STEPS + 1))
    expected = await train_to_the_end(kafka, calm)
    for sabotage in KILLS:
        assert await ended(start(killed, *sabotage)) == -signal.SIGKILL, sabotage[0].__name__
    found = await train_to_the_end(kafka, killed)
    assert [w.version for w in expected] == list(range(STEPS + 1))
    assert [(w.version, w.sha256, w.probe) for w in found] == [(w.version, w.sha256, w.probe) for w in expected]
    assert len({w.sha256 for w in expected}) == STEPS + 1
    files = [
        (tmp_path / "run" / "checkpoints" / policy / f"v{STEPS}" / checkpoint.OPTIMIZER).read_bytes()
        for policy in ("calm", "killed")
    ]
    assert files[0] == files[1]


async def test_a_gap_in_the_batches_stops_it(kafka, tmp_path):
    settings = settings_for(tmp_path / "run", make_policy_folder(tmp_path / "m"), policy="gap", kafka_bootstrap=kafka)
    await write_batches(kafka, "gap", [1, 3])
    with pytest.raises(BatchError, match="batch 3 came where batch 2"):
        async with asyncio.timeout(60):
            await service.run(settings, asyncio.Event())
    assert [w.version for w in await published(kafka, "gap")] == [0, 1]


async def test_a_loss_that_is_no_number_is_neither_kept_nor_published(kafka, tmp_path):
    model_dir = make_policy_folder(tmp_path / "m", tied=False)
    tensors = load_file(model_dir / "model.safetensors")
    unprobed = sorted(set(range(VOCABULARY)) - set(probe_ids(VOCABULARY)))
    tensors["model.embed_tokens.weight"][unprobed] = math.nan
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    settings = settings_for(tmp_path / "run", model_dir, policy="nan", kafka_bootstrap=kafka)
    await write_batches(kafka, "nan", [1])
    for _ in range(2):
        with pytest.raises(NonFiniteStep, match="batch 1: the loss is nan"):
            async with asyncio.timeout(60):
                await service.run(settings, asyncio.Event())
    assert [w.version for w in await published(kafka, "nan")] == [0]
    assert checkpoint.complete_versions(tmp_path / "run" / "checkpoints" / "nan") == []


def test_a_users_mistake_is_one_line_and_status_1(kafka, tmp_path, monkeypatch, capsys):
    model_dir = make_policy_folder(tmp_path / "model")
    (model_dir / "tokenizer.json").unlink()
    for name, value in to_environment(settings_for(tmp_path / "run", model_dir, kafka_bootstrap=kafka)).items():
        monkeypatch.setenv(name, value)
    assert service.main() == 1
    monkeypatch.setenv("POLAR_LEARNING_RATE", "fast")
    assert service.main() == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{service.SOURCE}: ")]
    assert len(lines) == 2
    assert "has no tokenizer" in lines[0] and str(model_dir) in lines[0]
    assert "POLAR_LEARNING_RATE='fast'" in lines[1]
