"""The benchmark's client: what it times, and what it does not take for an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from scripted_engine import Fault, Plan, ScriptedEngine

from benchmarks.gateway import DIRECT, Measured, body, plans, text
from benchmarks.gateway_load import Caller, CallFailed, Timing


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(Plan(content="one two three", between_s=0.001)).serving() as serving:
        yield serving


async def test_streamed_and_whole_calls_on_one_connection(engine: ScriptedEngine) -> None:
    caller = Caller(engine.url)
    for streamed in (True, False, True):
        timing = await caller.call(DIRECT, body("hello", "x", streamed=streamed), streamed=streamed)
        assert 0 < timing.first_s <= timing.total_s
        assert (timing.first_s < timing.total_s) == streamed
    caller.close()


@pytest.mark.parametrize(
    "fault",
    [Fault(kind="cut", after=1), Fault(kind="cut"), Fault(kind="status", status=503), Fault(kind="error", after=1)],
)
async def test_no_answer_is_a_failure(engine: ScriptedEngine, fault: Fault) -> None:
    engine.fail_next("chat", fault)
    caller = Caller(engine.url)
    with pytest.raises(CallFailed):
        await caller.call(DIRECT, body("hello", "x", streamed=True), streamed=True)
    assert await caller.call(DIRECT, body("hello", "x", streamed=True), streamed=True)
    caller.close()


def test_sizes_are_those_that_are_named() -> None:
    replies = {word: len(Plan(**plan).sampled) for word, plan in plans().items()}
    assert (replies["short"], replies["long"], replies["paced"]) == (32, 256, 256)
    prompt = ScriptedEngine().prompt([{"role": "user", "content": text(8000, 1)}])
    assert abs(len(prompt) - 8000) < 20


def test_added_is_the_difference_of_percentiles() -> None:
    slow, quick = [Timing(0.003, 0.010)] * 99, [Timing(0.001, 0.004)] * 99
    found = Measured(direct=[*quick, Timing(1, 1)], gateway=[*slow, Timing(2, 2)], cpu_s=0.5)
    assert found.added_ms("first_s", 0.5) == pytest.approx(2)
    assert found.added_ms("total_s", 0.5) == pytest.approx(6)
    assert found.added_ms("total_s", 0.99) == pytest.approx(1000)
    assert found.cpu_ms == pytest.approx(5)
