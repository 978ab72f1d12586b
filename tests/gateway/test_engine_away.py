"""An engine that is away, or goes away, is the infrastructure's fault in the record, also when the call is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from capture_stand import Engine, Log, call, sampler
from engine_fixture import free_port
from session_stories import completed, ending, fold, opened

from gateway_app.call import Call
from gateway_app.failures import Failure, classify
from gateway_app.stopping import Stop, client_left
from polar.engine.client import EngineClient, EngineError, EngineUnavailable
from polar.trajectories import assemble
from schemas.sessions import CallDelivery, CallFailed, CallStarted

HI = [{"role": "user", "content": "hi"}]


async def open_call(url: str, log: Log, stop: Stop, hold_s: float = 30.0) -> Call:
    async with EngineClient(url) as engine:
        one = call(log, sampler(engine, hold_s), HI, stop)
        sampling = sampler(engine, hold_s).sampling(one)
        await sampling.open()
        await one.begin()
        await sampling.close()
        return one


async def test_a_request_that_waits_for_the_engine_is_on_the_log_and_waits_no_longer_than_its_client() -> None:
    log, stop = Log(), Stop()
    waiting = asyncio.create_task(open_call(f"http://127.0.0.1:{free_port()}", log, stop))
    await log.holds(CallFailed)
    assert not waiting.done()
    stop.set(client_left())
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(waiting, 2.0)
    begun, failed = log.records
    assert isinstance(begun, CallStarted) and begun.prompt_ids == b""
    assert isinstance(failed, CallFailed) and failed.infrastructure and failed.call_id == begun.call_id
    assert failed.reason == "engine_unavailable"


async def test_a_request_goes_on_under_a_new_id_when_the_engine_is_back() -> None:
    log, port = Log(), free_port()
    waiting = asyncio.create_task(open_call(f"http://127.0.0.1:{port}", log, Stop()))
    await log.holds(CallFailed)
    async with Engine().running(port):
        one = await asyncio.wait_for(waiting, 10)
    first, failed, second = log.records
    assert isinstance(first, CallStarted) and isinstance(failed, CallFailed) and isinstance(second, CallStarted)
    assert first.call_id == failed.call_id != second.call_id == one.call_id
    assert (first.number, second.number, second.base_call_id) == (0, 1, None)
    end = [
        msgspec.structs.replace(completed(1, [3]), call_id=one.call_id),
        CallDelivery(session_id="s", attempt=0, call_id=one.call_id, delivered=True),
    ]
    assembly = assemble(fold([opened(), first, failed, second, *end, *ending()]))
    assert assembly.verdict.usable and len(assembly.traces) == 1


@pytest.mark.parametrize("away", [{"generate"}, {"abort_requests"}, {"generate", "abort_requests"}])
async def test_a_call_stopped_while_the_engine_is_away_is_no_fault_of_the_agent(away: set[str]) -> None:
    log, stop, engine = Log(), Stop(), Engine(*away)
    async with engine.running() as url, EngineClient(url) as client:
        sampling = sampler(client).sampling(call(log, sampler(client), HI, stop))
        await sampling.open()
        stopping = asyncio.create_task(stop_after(engine.asked, stop))
        with pytest.raises((EngineError, Failure)) as raised:
            async with asyncio.timeout(10):
                async for _ in sampling.deltas():
                    pass
        await stopping
        await sampling.close()
    error: Any = raised.value
    failure = classify(error)
    assert (failure.reason, failure.infrastructure) == ("engine_unavailable", True)


async def stop_after(asked: asyncio.Event, stop: Stop) -> None:
    await asked.wait()
    await asyncio.sleep(0.1)
    stop.set(client_left())
