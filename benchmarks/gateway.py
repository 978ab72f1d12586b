"""``python -m benchmarks.gateway --json``: what the gateway costs and adds, capture and Kafka included.

The real gateway process has one core to itself, a scripted engine and the load share the other, and Kafka takes what is
free of both. Calls straight to the engine's streamed chat completions alternate with calls through the gateway in the
same run, and are the base: what is *added* is the gateway's percentile less the engine's. CPU is the gateway process's
own, user and system. Every call is the first of a session of its own, so that its whole prompt is recorded.

The last line of stdout is one JSON object with ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_load import Caller, CallFailed, Timing
from benchmarks.gateway_stage import SECRET, Cores, GatewayProcess, StageError, gateway, on_core, scripted_engine
from polar.session_token import sign
from streams.broker import LocalBroker
from streams.errors import StreamError

DIRECT = "/v1/chat/completions"
MODES = {"chat": {"engine_api": "chat"}, "exact": {"engine_api": "tokens", "history": "exact"}}
CHARACTERS_A_TOKEN = 3
CALLERS = 16
RATE = 20.0
SESSIONS = 1000
WORDS = [
    "read",
    "the",
    "file",
    "then",
    "write",
    "a",
    "test",
    "run",
    "it",
    "and",
    "say",
    "what",
    "it",
    "found",
    "in",
    "one",
    "short",
    "line",
]
REPLY = "The file has a list of names; I will sort it, write it back and run the test again. "

Request = Callable[[], tuple[str, bytes]]
"""Gives the path and body of the next call."""


class Sizes(msgspec.Struct, frozen=True):
    """How many calls each measurement makes."""

    streamed: int = 150
    open_loop_s: float = 10.0
    paced: int = 20
    small: int = 3000
    growth: int = 20_000
    rounds: int = 3


def text(tokens: int, seed: int) -> str:
    """Of about ``tokens`` tokens of the scripted engine."""
    chosen = random.Random(seed)
    length, words = tokens * CHARACTERS_A_TOKEN, [f"{seed}:"]
    size = len(words[0])
    while size < length:
        word = chosen.choice(WORDS)
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:length]


def plans() -> dict[str, Any]:
    """The replies of the scripted engine, by the word that ends the prompt."""

    def reply(tokens: int) -> str:
        return (REPLY * tokens)[: (tokens - 1) * CHARACTERS_A_TOKEN]

    return {
        "": {"content": reply(32)},
        "short": {"content": reply(32)},
        "long": {"content": reply(256)},
        "paced": {"content": reply(256), "between_s": 0.002},
        "one": {"content": reply(2)},
    }


def body(prompt: str, word: str, *, streamed: bool) -> bytes:
    messages = [
        {"role": "system", "content": "You are a careful programmer."},
        {"role": "user", "content": f"{prompt} {word}"},
    ]
    return msgspec.json.encode({"model": "policy", "messages": messages, "stream": streamed, "temperature": 1.0})


def direct(content: bytes) -> Request:
    return lambda: (DIRECT, content)


def through_gateway(content: bytes, calls_each: int = 1) -> Request:
    """Each call, or each so many, with a session of its own."""
    numbers = itertools.count()
    paths: dict[int, str] = {}

    def give() -> tuple[str, bytes]:
        number = next(numbers) // calls_each
        if number not in paths:
            paths.clear()
            session = f"bench-{random.getrandbits(64):016x}"
            paths[number] = f"/s/{sign(SECRET, session, 0, 3600)}/v1/chat/completions"
        return paths[number], content

    return give


# Measurements


class Measured(msgspec.Struct):
    """Timings of both ways, and the gateway's CPU for its calls."""

    direct: list[Timing]
    gateway: list[Timing]
    cpu_s: float = 0.0

    def added_ms(self, field: str, quantile: float) -> float:
        return quantile_ms(self.gateway, field, quantile) - self.direct_ms(field, quantile)

    def direct_ms(self, field: str, quantile: float) -> float:
        return quantile_ms(self.direct, field, quantile)

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s * 1000 / len(self.gateway)


def quantile_ms(timings: list[Timing], field: str, quantile: float) -> float:
    values = sorted(getattr(one, field) for one in timings)
    return values[min(int(quantile * len(values)), len(values) - 1)] * 1000


async def alternating(
    engine_url: str, process: GatewayProcess, content: bytes, count: int, *, warm_up: int = 10
) -> Measured:
    """One call at a time, to the engine and through the gateway in turn."""
    found = Measured([], [])
    straight, behind = direct(content), through_gateway(content)
    async with callers(engine_url, 1) as [first], callers(process.url, 1) as [second]:
        for _ in range(warm_up):
            await first.call(*straight(), streamed=True)
            await second.call(*behind(), streamed=True)
        before = process.cpu_s()
        for _ in range(count):
            found.direct.append(await first.call(*straight(), streamed=True))
            found.gateway.append(await second.call(*behind(), streamed=True))
        found.cpu_s = process.cpu_s() - before
    return found


async def at_rate(engine_url: str, process: GatewayProcess, content: bytes, seconds: float, rounds: int) -> Measured:
    """Calls at fixed times, whether or not earlier ones have ended; the two ways in turn, ``rounds`` times each."""
    found = Measured([], [])
    for _ in range(rounds):
        found.direct += await _open_loop(engine_url, direct(content), seconds)
        found.gateway += await _open_loop(process.url, through_gateway(content), seconds)
    return found


async def _open_loop(url: str, request: Request, seconds: float) -> list[Timing]:
    loop = asyncio.get_running_loop()
    idle: list[Caller] = []
    start = loop.time() + 0.05

    async def one(number: int) -> Timing:
        await asyncio.sleep(start + number / RATE - loop.time())
        caller = idle.pop() if idle else Caller(url)
        timing = await caller.call(*request(), streamed=True)
        idle.append(caller)
        return timing

    timings = await asyncio.gather(*(one(number) for number in range(round(seconds * RATE))))
    for caller in idle:
        caller.close()
    return timings


async def closed_loop(url: str, request: Request, count: int, *, streamed: bool) -> None:
    """CALLERS at once, ``count`` calls together."""
    left = iter(range(count))
    async with callers(url, CALLERS) as all_callers:

        async def work(caller: Caller) -> None:
            for _ in left:
                await caller.call(*request(), streamed=streamed)

        await asyncio.gather(*map(work, all_callers))


@asynccontextmanager
async def callers(url: str, count: int) -> AsyncIterator[list[Caller]]:
    made = [Caller(url) for _ in range(count)]
    try:
        yield made
    finally:
        for caller in made:
            caller.close()


# What is reported


async def streamed(engine_url: str, process: GatewayProcess, sizes: Sizes) -> dict[str, float]:
    prompt = text(8000, 1)
    quick = await alternating(engine_url, process, body(prompt, "long", streamed=True), sizes.streamed)
    loaded = await at_rate(engine_url, process, body(prompt, "long", streamed=True), sizes.open_loop_s, sizes.rounds)
    paced = await alternating(engine_url, process, body(prompt, "paced", streamed=True), sizes.paced, warm_up=1)
    return {
        "added_first_token_ms_p50": quick.added_ms("first_s", 0.5),
        "added_total_ms_p50": quick.added_ms("total_s", 0.5),
        "added_total_ms_p99_at_20": loaded.added_ms("total_s", 0.99),
        "cpu_ms_per_call": quick.cpu_ms,
        "cpu_ms_per_call_2ms": paced.cpu_ms,
        "added_first_token_ms_p50_2ms": paced.added_ms("first_s", 0.5),
        "direct_total_ms_p50": quick.direct_ms("total_s", 0.5),
        "direct_total_ms_p99_at_20": loaded.direct_ms("total_s", 0.99),
    }


async def small(process: GatewayProcess, sizes: Sizes, *, streamed: bool) -> dict[str, float]:
    request = through_gateway(body(text(200, 2), "short", streamed=streamed))
    await closed_loop(process.url, request, sizes.small // 10, streamed=streamed)
    before, start = process.cpu_s(), asyncio.get_running_loop().time()
    await closed_loop(process.url, request, sizes.small, streamed=streamed)
    seconds, cpu = asyncio.get_running_loop().time() - start, process.cpu_s() - before
    return {"calls_per_cpu_second": sizes.small / cpu, "calls_per_second": sizes.small / seconds}


async def open_sessions(process: GatewayProcess) -> float:
    """How much the process grows by sessions that are open, each with a conversation of its own."""
    await small(process, Sizes(small=500), streamed=False)
    before = process.rss_mb()
    async with callers(process.url, 1) as [caller]:
        for number in range(SESSIONS):
            content = body(text(30_000, number), "one", streamed=False)
            await caller.call(*through_gateway(content)(), streamed=False)
    return process.rss_mb() - before


async def growth(process: GatewayProcess, sizes: Sizes) -> dict[str, float]:
    """Sessions of ten calls, none of them ever closed; the first fifth of the calls is not counted."""
    request = through_gateway(body(text(200, 3), "short", streamed=True), calls_each=10)
    await closed_loop(process.url, request, sizes.growth // 5, streamed=True)
    before = process.rss_mb()
    counted = sizes.growth - sizes.growth // 5
    await closed_loop(process.url, request, counted, streamed=True)
    return {"calls": counted, "growth_mb": process.rss_mb() - before, "rss_mb": process.rss_mb()}


class Bench:
    """Starts a gateway for each measurement, on one engine and one broker."""

    def __init__(self, folder: Path, cores: Cores, engine_url: str, bootstrap: str, console: Console) -> None:
        self._folder, self._cores, self._console = folder, cores, console
        self._engine_url, self._bootstrap = engine_url, bootstrap

    async def run(self, sizes: Sizes, parts: set[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for capture in ("on", "off"):
            into = found if capture == "on" else found.setdefault("without_capture", {})
            if "streamed" in parts:
                into["streamed"] = {mode: await self._streamed(mode, capture, sizes) for mode in MODES}
            if "small" in parts:
                into |= await self._small(capture, sizes)
        if "memory" in parts:
            with self._gateway("exact", "on") as process:
                found["memory_mb_1000_sessions"] = await open_sessions(process)
        if "growth" in parts:
            with self._gateway("exact", "on") as process:
                found["growth"] = await growth(process, sizes)
        return found

    async def _streamed(self, mode: str, capture: str, sizes: Sizes) -> dict[str, float]:
        self._console.print(f"8k prompt, 256 streamed tokens, {mode}, capture {capture}")
        with self._gateway(mode, capture) as process:
            return await streamed(self._engine_url, process, sizes)

    async def _small(self, capture: str, sizes: Sizes) -> dict[str, Any]:
        self._console.print(f"small calls, capture {capture}")
        with self._gateway("chat", capture) as process:
            whole = await small(process, sizes, streamed=False)
            return {"small": whole, "small_streamed": await small(process, sizes, streamed=True)}

    def _gateway(self, mode: str, capture: str) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = MODES[mode] | {"capture": capture}
        return gateway(self._folder, self._cores, self._engine_url, self._bootstrap, port, **settings)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table("what", "measured", title="gateway")
    for name, value in flat(found):
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    console.print(table)


def flat(found: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in found.items():
        rows += flat(value, f"{before}{name}.") if isinstance(value, dict) else [(before + name, value)]
    return rows


def machine(cores: Cores) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "gateway_core": cores.gateway}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    parts = {"streamed", "small", "memory", "growth"}
    parser.add_argument("--only", choices=sorted(parts), action="append", help="this part; may be given again")
    parser.add_argument("--calls", type=int, default=Sizes().growth, help="how many calls the growth is measured over")
    parser.add_argument("--full", action="store_true", help="growth over 100,000 calls")
    parser.add_argument("--quick", action="store_true", help="a few calls of each: to see that it runs")
    options = parser.parse_args()
    sizes = Sizes(growth=100_000 if options.full else options.calls)
    if options.quick:
        sizes = Sizes(streamed=20, open_loop_s=2, paced=2, small=300, growth=500, rounds=1)
    console = Console(stderr=True, soft_wrap=True)
    try:
        cores = Cores.choose()
        with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
            folder = Path(name)
            with (
                LocalBroker(folder) as broker,
                on_core(cores.rest),
                scripted_engine(folder, plans(), 65_536) as engine_url,
            ):
                bench = Bench(folder, cores, engine_url, broker.bootstrap, console)
                found = uvloop.run(bench.run(sizes, set(options.only or parts)))
    except (StageError, StreamError, CallFailed) as error:
        console.print(f"error: {error}", markup=False)
        return 1
    found = rounded(found | {"machine": machine(cores)})
    show(console, found)
    if options.json:
        print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
