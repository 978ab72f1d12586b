"""Whether an agent program, as its preset starts it, asks the model where it should.

The program runs in a sandbox with a trivial instruction. A listener on the loopback stands where the gateway would,
answers every request with an error, and has seen enough when one has come to the session's path in a dialect that the
preset names.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from polar.harnesses.harness import DialectName, Preset
from polar.harnesses.packages import HarnessError, Located, NpmPackage, located
from polar.harnesses.venvs import located_module
from polar.runtimes.runtime import Ended, Program, Sandbox

INSTRUCTION = "Say hello."
SESSION = "/s/probe"
DIALECTS: dict[DialectName, str] = {
    "openai.chat": r"/v1/chat/completions",
    "openai.responses": r"/v1/responses",
    "anthropic.messages": r"/v1/messages",
    "google.generate": r"/v1beta/models/[^/:]+:(streamGenerateContent|generateContent)",
}
"""The path of each dialect's model call, below the session's root."""
REFUSAL = {"error": {"message": "this is a probe", "type": "invalid_request_error", "code": 400}}


class Call(msgspec.Struct, frozen=True):
    """A request as the listener saw it. ``dialect`` is None when it is no model call of this session."""

    method: str
    path: str
    dialect: DialectName | None
    seconds: float


class Listener:
    """What stands where the gateway would. ``model_called`` is set by the first model call of ``dialects``."""

    def __init__(self, dialects: tuple[DialectName, ...]) -> None:
        self._dialects, self._started = dialects, time.monotonic()
        self.calls: list[Call] = []
        self.model_called = asyncio.Event()
        self.root = ""

    async def answer(self, request: web.Request) -> web.Response:
        path = re.sub("/+", "/", request.path)
        dialect = _dialect(path) if request.method == "POST" else None
        self.calls.append(Call(request.method, path, dialect, time.monotonic() - self._started))
        if dialect in self._dialects:
            self.model_called.set()
        return web.json_response(REFUSAL, status=400)


def _dialect(path: str) -> DialectName | None:
    """
    >>> _dialect("/s/probe/v1/messages"), _dialect("/s/probe/v1/messages/count_tokens"), _dialect("/v1/messages")
    ('anthropic.messages', None, None)
    """
    return next((name for name, shape in DIALECTS.items() if re.fullmatch(SESSION + shape, path)), None)


@asynccontextmanager
async def listening(dialects: tuple[DialectName, ...]) -> AsyncIterator[Listener]:
    """``root`` is where it listens while this is open."""
    listener, app = Listener(dialects), web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", listener.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        listener.root = f"http://{host}:{port}{SESSION}"
        yield listener
    finally:
        await runner.cleanup()


async def probe(name: str, preset: Preset, sandbox: Sandbox, deadline_s: float) -> list[Call]:
    """The requests up to the first model call. Raises HarnessError when none came, with the program's last words."""
    async with listening(preset.dialects) as listener:
        agent = preset.program({}, INSTRUCTION, listener.root)
        running = asyncio.ensure_future(sandbox.run(agent, deadline_s))
        called = asyncio.ensure_future(listener.model_called.wait())
        try:
            await asyncio.wait({running, called}, return_when=asyncio.FIRST_COMPLETED)
            if not listener.model_called.is_set():
                raise HarnessError(f"harness {name}: {_silence(await running, listener.calls, preset)}")
            return listener.calls
        finally:
            for future in (running, called):
                future.cancel()
            await asyncio.wait({running, called})


def _silence(ended: Ended, calls: list[Call], preset: Preset) -> str:
    how = ended.reason or f"it ended with exit code {ended.exit_code}"
    asked = ", ".join(sorted({f"{call.method} {call.path}" for call in calls})) or "nothing"
    said = " ".join((ended.stderr.strip() or ended.stdout.strip())[-400:].split())
    return (
        f"no call in {' or '.join(preset.dialects)} arrived: {how}; it asked for {asked}; it said: {said or 'nothing'}"
    )


async def started(name: str, preset: Preset, sandbox: Sandbox, deadline_s: float) -> str:
    """What the program says of itself in the sandbox, in a line. Raises HarnessError."""
    place = starting(name, preset)
    # Of the Python programs not all know --version.
    asked = "--version" if isinstance(preset.package, NpmPackage) else "--help"
    alone = Program(argv=[*place.argv, asked], environment={"PATH": place.path}, mounts=place.mounts)
    ended = await sandbox.run(alone, deadline_s)
    said = ended.stdout.strip() or ended.stderr.strip()
    if ended.exit_code != 0:
        how = ended.reason or f"exit code {ended.exit_code}"
        last = " ".join(said.split())[-400:] or "it said nothing"
        raise HarnessError(f"harness {name}: it does not start in the sandbox: {how}: {last}")
    return f"{asked} says {said.splitlines()[0] if asked == '--version' and said else 'how it is used'}"


def starting(name: str, preset: Preset) -> Located:
    """How a sandbox runs the preset's program, without its arguments. Raises HarnessError."""
    if isinstance(preset.package, NpmPackage):
        return located(name, preset.package)
    assert preset.package is not None, "asked only of presets that have one"
    return located_module(name, preset.package)
