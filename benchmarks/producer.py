"""``python -m benchmarks.producer --json``: what a record costs the program that writes it, and how long Kafka takes.

A local broker has one core, the producer with its loop (uvloop) the other. The base is aiokafka's own producer with
the same values and headers, made beforehand: the ratios are ours, encoding included, to that, in the same run; below
1 is cheaper. ``cpu_us`` is CPU time of this process per record, user and system; ``ack_ms`` the median until the
acknowledgement. ``callers`` write the three records of a call each, one after another, 16 at a time.

The last line of stdout is one JSON object with ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiokafka import AIOKafkaProducer

from benchmarks.gateway_stage import Cores, StageError, on_core
from schemas.ids import new_id
from schemas.packed import pack_ids, pack_logprobs
from schemas.record import Record
from schemas.sessions import CallCompleted, CallDelivery, CallStarted, Sampling, VersionSpan
from streams.broker import LocalBroker
from streams.codec import encode
from streams.errors import StreamError
from streams.producer import Producer
from streams.topics import MIB, SESSIONS

CALLERS = 16
VOCABULARY = 150_000
WORDS = ("read", "the", "file", "then", "write", "a", "test", "run", "it", "and", "say", "what", "it", "found")

Send = Callable[[Record], Awaitable[Any]]


class Cost(msgspec.Struct, frozen=True):
    cpu_us: float
    ack_ms: float


def text(random_: random.Random, characters: int) -> str:
    words = (f"{random_.choice(WORDS)}{random_.randrange(1000)}" for _ in range(characters // 3))
    return " ".join(words)[:characters]


def call(random_: random.Random, *, characters: int, prompt: int, response: int) -> tuple[Record, Record, Record]:
    """The three records of a call: started, completed, delivery."""
    session, call_id = new_id(), new_id()
    started = CallStarted(
        session_id=session,
        attempt=0,
        call_id=call_id,
        number=1,
        dialect="openai.chat",
        model="benchmark",
        streamed=True,
        messages=[{"role": "user", "content": text(random_, characters)}],
        tools=[],
        prompt_ids=pack_ids(random_.randrange(VOCABULARY) for _ in range(prompt)),
        sampling=Sampling(),
    )
    completed = CallCompleted(
        session_id=session,
        attempt=0,
        call_id=call_id,
        message={"role": "assistant", "content": text(random_, 3 * response)},
        response_ids=pack_ids(random_.randrange(VOCABULARY) for _ in range(response)),
        logprobs=pack_logprobs(-random_.random() for _ in range(response)),
        finish_reason="stop",
        weight_versions=[VersionSpan(1, 0, response)],
        usage={"prompt_tokens": prompt, "completion_tokens": response},
    )
    return started, completed, CallDelivery(session_id=session, attempt=0, call_id=call_id, delivered=True)


async def one_at_a_time(send: Send, record: Record, times: int) -> Cost:
    waits, before = [], time.process_time()
    for _ in range(times):
        asked = time.perf_counter()
        await send(record)
        waits.append(time.perf_counter() - asked)
    return _cost(time.process_time() - before, waits)


async def callers(send: Send, calls: list[tuple[Record, Record, Record]], times: int) -> Cost:
    waits: list[float] = []

    async def caller(records: tuple[Record, Record, Record]) -> None:
        for _ in range(times):
            for record in records:
                asked = time.perf_counter()
                await send(record)
                waits.append(time.perf_counter() - asked)

    before = time.process_time()
    await asyncio.gather(*map(caller, calls))
    return _cost(time.process_time() - before, waits)


async def measure(bootstrap: str, times: int) -> dict[str, Any]:
    random_ = random.Random(0)
    calls = [call(random_, characters=1000, prompt=60, response=32) for _ in range(CALLERS)]
    long = call(random_, characters=33_000, prompt=8000, response=256)[0]
    ready = {id(record): encode(record, source="benchmark") for record in [long, *(one for c in calls for one in c)]}
    bare = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        compression_type="zstd",
        max_batch_size=MIB,
        max_request_size=8 * MIB,
    )
    async with Producer(bootstrap, source="benchmark") as producer, bare:

        async def ours(record: Record) -> None:
            await producer.send(SESSIONS, record)

        async def theirs(record: Record) -> None:
            value, headers = ready[id(record)]
            await bare.send_and_wait(SESSIONS, value, record.session_id.encode(), headers=headers)  # type: ignore[attr-defined]

        cases: dict[str, Callable[[Send], Awaitable[Cost]]] = {
            "small": lambda send: one_at_a_time(send, calls[0][1], times),
            "callers": lambda send: callers(send, calls, times // 3),
            "long": lambda send: one_at_a_time(send, long, times // 5),
        }
        found: dict[str, dict[str, list[Cost]]] = {name: {"ours": [], "aiokafka": []} for name in cases}
        for lap in range(4):
            for name, case in cases.items():
                for whose, send in (("ours", ours), ("aiokafka", theirs)):
                    cost = await case(send)
                    if lap:  # the first one warms up
                        found[name][whose].append(cost)
    return {name: _summary(costs["ours"], costs["aiokafka"]) for name, costs in found.items()}


def _cost(cpu_s: float, waits: list[float]) -> Cost:
    return Cost(cpu_us=1e6 * cpu_s / len(waits), ack_ms=1e3 * statistics.median(waits))


def _summary(ours: list[Cost], aiokafka: list[Cost]) -> dict[str, float]:
    """Medians over the laps."""
    cpu, base = (statistics.median(one.cpu_us for one in costs) for costs in (ours, aiokafka))
    ack, base_ack = (statistics.median(one.ack_ms for one in costs) for costs in (ours, aiokafka))
    found = {"cpu_us": cpu, "ack_ms": ack, "aiokafka_cpu_us": base, "aiokafka_ack_ms": base_ack}
    return {name: round(value, 3) for name, value in found.items()} | {"cpu_ratio": round(cpu / base, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.producer", description=__doc__)
    parser.add_argument("--records", type=int, default=600, help="of each kind and lap")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    options = parser.parse_args()
    if options.records < 30:
        parser.error("--records must be at least 30")
    try:
        cores = Cores.choose()
        with tempfile.TemporaryDirectory() as folder, on_core(cores.rest), LocalBroker(Path(folder)) as broker:
            os.sched_setaffinity(0, {cores.gateway})
            found = uvloop.run(measure(broker.bootstrap, options.records))
    except (StageError, StreamError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, numbers in {} if options.json else found.items():
        print(f"{name:<8}" + "  ".join(f"{key} {value}" for key, value in numbers.items()))
    if options.json:
        print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
