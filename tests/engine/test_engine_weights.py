"""Weights loaded into real vLLM while it samples: requests survive, versions are by token, log-probs are exact."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_fixture import RunningEngine
from transformers import AutoModelForCausalLM

from consumers.weight_loader import run
from polar.engine import token_api
from polar.engine.client import EngineClient, EngineUnavailable
from polar.settings import Settings
from schemas.packed import pack_ids, pack_logprobs
from schemas.weights import Probe, WeightsLoaded, WeightsPublished
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import WEIGHTS

pytestmark = pytest.mark.engine

PROMPT = [1, 287, 300, 91, 81, 87, 264, 84, 71, 5, 223, 54]


@pytest.fixture
async def client(engine: RunningEngine) -> AsyncIterator[EngineClient]:
    """At version 0 before and after."""
    async with EngineClient(engine.url) as client:
        if await client.weight_version() != "0":
            await client.load_weights(str(engine.model), 0)
        yield client
        await client.load_weights(str(engine.model), 0)


def trainer_logprobs(model: Path, ids: list[int]) -> np.ndarray:
    """float32, shape (n−1,): what transformers says."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def prompt(tokens: int) -> token_api.Rendered:
    return token_api.Rendered(PROMPT, {"max_tokens": tokens, "ignore_eos": True}, {"model": "policy"})


async def test_requests_in_flight_survive_and_name_both_versions(client: EngineClient, engine: RunningEngine) -> None:
    begun = [asyncio.Event() for _ in range(3)]

    async def sample(index: int) -> tuple[int, list[tuple[str, int, int]]]:
        count, spans = 0, []
        rendered = prompt(500)
        async with token_api.generate(client, rendered, rendered.token_json, f"test-{index}") as stream:
            async for chunks in stream:
                for choice in (choice for chunk in chunks for choice in chunk.choices):
                    count += len(choice.token_ids or [])
                    spans += [(s.version, s.start, s.end) for s in choice.weight_versions or []]
                begun[index].set()
        return count, spans

    sampling = [asyncio.create_task(sample(index)) for index in range(3)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in begun))
    await client.load_weights(str(engine.other), 7)
    for count, spans in await asyncio.gather(*sampling):
        assert count == 500
        assert [version for version, _, _ in spans] == ["0", "7"]
        assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 500
    assert await client.weight_version() == "7"


async def test_logprobs_after_a_load_are_those_of_transformers(client: EngineClient, engine: RunningEngine) -> None:
    before = await client.probe_logprobs(PROMPT)
    await client.load_weights(str(engine.other), 1)
    after = await client.probe_logprobs(PROMPT)
    np.testing.assert_allclose(before, trainer_logprobs(engine.model, PROMPT), atol=1e-4)
    np.testing.assert_allclose(after, trainer_logprobs(engine.other, PROMPT), atol=1e-4)
    assert np.abs(before - after).max() > 0.1


async def test_an_update_that_was_cut_off_can_be_done_again(client: EngineClient, engine: RunningEngine) -> None:
    await client._request("POST", "/init_weight_transfer_engine", {"init_info": {}})
    await client._request("POST", "/pause?mode=keep")
    await client._request("POST", "/start_weight_update")
    assert await client.paused()
    await client.load_weights(str(engine.other), 2)
    assert not await client.paused()
    np.testing.assert_allclose(await client.probe_logprobs(PROMPT), trainer_logprobs(engine.other, PROMPT), atol=1e-4)


async def test_an_engine_that_is_not_there_is_named() -> None:
    async with EngineClient("http://127.0.0.1:1") as client:
        assert not await client.healthy()
        with pytest.raises(EngineUnavailable, match=r"127.0.0.1:1/weight_info"):
            await client.weight_version()


def published(version: int, model: Path, probe_of: Path | None = None) -> WeightsPublished:
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    logprobs = trainer_logprobs(probe_of or model, PROMPT)
    probe = Probe(prompt_ids=pack_ids(PROMPT), logprobs=pack_logprobs(logprobs))
    return WeightsPublished(
        policy=f"policy-{os.getpid()}", version=version, path=str(model), sha256=digest, probe=probe
    )


async def loaded(kafka: str, policy: str, count: int) -> list[WeightsLoaded]:
    found: list[WeightsLoaded] = []
    async with asyncio.timeout(60), Reader(kafka, [WEIGHTS], source="test") as reader:
        while len(found) < count:
            records = [one.record for one in await reader.poll(0.5)]
            found += [r for r in records if isinstance(r, WeightsLoaded) and r.policy == policy]
    return found


@pytest.mark.kafka
async def test_the_loader_follows_the_newest_weights_and_proves_them(
    tmp_path: Path, kafka: str, client: EngineClient, engine: RunningEngine, caplog: pytest.LogCaptureFixture
) -> None:
    base = published(0, engine.model)
    settings = Settings(run_dir=tmp_path, kafka_bootstrap=kafka, engine_url=engine.url, policy=base.policy)
    stop = asyncio.Event()
    async with Producer(kafka, source="test") as producer:
        await producer.send(WEIGHTS, base)
        running = asyncio.create_task(run(settings, stop))
        await loaded(kafka, base.policy, 1)

        spoilt = tmp_path / "spoilt"
        shutil.copytree(engine.other, spoilt)
        bad = msgspec.structs.replace(published(1, spoilt), sha256="0" * 64)
        await producer.send(WEIGHTS, bad)
        await producer.send(WEIGHTS, published(2, engine.other))
        await loaded(kafka, base.policy, 2)
        assert await client.weight_version() == "2"

        await client.load_weights(str(engine.model), 0)  # as an engine that was restarted
        await loaded(kafka, base.policy, 3)
        assert await client.weight_version() == "2"

        with caplog.at_level(logging.ERROR):
            await producer.send(WEIGHTS, published(3, engine.model, probe_of=engine.other))
            all_loaded = await loaded(kafka, base.policy, 4)
        stop.set()
        await running
    assert [record.version for record in all_loaded] == [0, 2, 2, 3]
    assert all(record.probe_max_difference < 1e-4 for record in all_loaded[:3])
    assert all_loaded[3].probe_mean_difference > 1e-3
    assert "VERSION 3 IS NOT WHAT THE TRAINER HAS" in caplog.text
