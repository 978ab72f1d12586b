"""The node: prepares sandboxes, runs agents and scores them, as the scheduler commands (``python -m consumers.node``).

It reads ``polar.scheduler`` from its end and then registers as a new incarnation, without sessions. It keeps no state:
when it is killed, the kernel ends its sandboxes, the scheduler notices by the lease or the next registration, and runs
their sessions again as higher attempts. A node whose lease has run out ends its sandboxes and registers anew.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from consumers.node_sessions import Action, Key, NodeSessions
from consumers.node_stages import LiveSession, Services
from consumers.process import run_process, say_ready
from polar.runtimes.local import LocalRuntime
from polar.runtimes.runtime import RuntimeFault
from polar.session_token import load_secret
from polar.settings import Settings, SettingsError
from schemas.ids import new_id
from schemas.scheduling import Cancel, Drain, NodeHeartbeat, NodeLost, NodeRegistered, Prewarm, Run
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import SCHEDULER

HEARTBEAT_S = 2.0
POLL_S = 1.0

log = logging.getLogger("polar.node")


class LeaseLost(Exception):
    """The scheduler has given this incarnation up."""


class Superseded(Exception):
    """Another process has registered under the same node id."""


class Stopped(Exception):
    """The process was asked to end."""


class Incarnation:
    """A node between one registration and its end."""

    def __init__(self, settings: Settings, services: Services, reader: Reader) -> None:
        self._settings, self._services, self._reader = settings, services, reader
        self._id: dict[str, Any] = {"node_id": settings.node_id, "incarnation": new_id()}
        self._sessions = NodeSessions(
            {
                "init": settings.init_slots,
                "ready": settings.ready_slots,
                "run": settings.run_slots,
                "postrun": settings.postrun_slots,
            }
        )
        self._live: dict[Key, LiveSession] = {}
        self._inboxes: dict[Key, asyncio.Queue[Action]] = {}
        self._registered = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Raises an ExceptionGroup with LeaseLost, Superseded, Stopped or a StreamError; then no sandbox is left."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._register()
            tasks.create_task(self._heartbeats())
            tasks.create_task(self._follow(stop))

    async def _register(self) -> None:
        settings = self._settings
        registered = NodeRegistered(
            **self._id,
            init_slots=settings.init_slots,
            ready_slots=settings.ready_slots,
            run_slots=settings.run_slots,
            postrun_slots=settings.postrun_slots,
        )
        await self._services.producer.send(SCHEDULER, registered)
        log.info("node %s registered as %s", settings.node_id, self._id["incarnation"])

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            counts = self._sessions.counts()
            heartbeat = NodeHeartbeat(
                **self._id,
                preparing=counts["init"],
                ready=counts["ready"],
                running=counts["run"],
                postrun=counts["postrun"],
            )
            await self._services.producer.send(SCHEDULER, heartbeat)

    async def _follow(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for received in await self._reader.poll(timeout_s=POLL_S):
                self._read(received.record)
        raise Stopped

    def _read(self, record: Any) -> None:
        if getattr(record, "node_id", None) != self._settings.node_id:
            return
        if record.incarnation != self._id["incarnation"]:
            if isinstance(record, NodeRegistered) and self._registered:
                raise Superseded(
                    f"another process registered as {self._settings.node_id}: give each node a POLAR_NODE_ID of its own"
                )
            return
        match record:
            case NodeRegistered():
                self._registered = True
            case NodeLost():
                raise LeaseLost(record.reason)
            case Prewarm():
                self._prewarm(record)
            case Run():
                self._act(self._sessions.run((record.session_id, record.attempt)))
            case Cancel():
                self._act(self._sessions.cancel((record.session_id, record.attempt), record.reason))
            case Drain():
                self._sessions.drain()

    def _prewarm(self, command: Prewarm) -> None:
        key = (command.session_id, command.attempt)
        if not self._sessions.admits(key):
            return
        self._live[key], self._inboxes[key] = LiveSession(command, self._services), asyncio.Queue()
        self._tasks.create_task(self._life(key))
        self._act(self._sessions.prewarm(key))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if action.verb == "stop":
                self._live[action.key].stop()
            else:
                self._inboxes[action.key].put_nowait(action)

    async def _life(self, key: Key) -> None:
        """Does one thing after another for one session, so that its reports keep their order."""
        live, inbox = self._live[key], self._inboxes[key]
        while True:
            action = await inbox.get()
            match action.verb:
                case "prepare":
                    self._act(self._sessions.prepared(key, await live.prepare()))
                case "announce":
                    await live.announce()
                case "launch":
                    timed_out, fault = await live.launch()
                    self._act(self._sessions.exited(key, timed_out=timed_out, fault=fault))
                case "score":
                    await live.score()
                    self._act(self._sessions.scored(key))
                case "finish":
                    await live.finish(action.outcome, action.reason)
                    self._sessions.finished(key)
                    del self._live[key], self._inboxes[key]
                    return


async def run_node(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until ``stop`` is set. Raises SettingsError, RuntimeFault, Superseded or a StreamError."""
    if Path(settings.node_id).name != settings.node_id or settings.node_id in (".", ".."):
        raise SettingsError(f"POLAR_NODE_ID={settings.node_id!r}: it names a folder, so it must be one plain name")
    folder = settings.run_dir / "sessions" / settings.node_id
    runtime = LocalRuntime(folder, hidden=[settings.run_dir], unsafe=settings.unsafe_local)
    await asyncio.to_thread(runtime.clear)
    await runtime.check()
    source = f"node/{settings.node_id}"
    async with Producer(settings.kafka_bootstrap, source=source) as producer:
        services = Services(producer, runtime, load_secret(settings), settings.gateway_url)
        async with Reader(settings.kafka_bootstrap, [SCHEDULER], source=source, start="end") as reader:
            say_ready()
            while not stop.is_set():
                try:
                    await Incarnation(settings, services, reader).serve(stop)
                except* LeaseLost as lost:
                    log.warning("the scheduler gave this node up (%s): it starts anew", lost.exceptions[0])
                except* Stopped:
                    log.info("node %s stops", settings.node_id)
                finally:
                    await asyncio.to_thread(runtime.clear)


if __name__ == "__main__":
    sys.exit(run_process("node", run_node, (RuntimeFault, Superseded, OSError)))
