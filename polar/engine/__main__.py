"""``python -m polar.engine``: runs vLLM on the model folder until SIGTERM, and labels its weights version 0.

vLLM is a child in a process group of its own. It ends with this process, and this process with its parent, however
they end. A wedged engine may ignore SIGTERM, so the whole group is killed after a deadline.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

from polar.engine.client import EngineClient, EngineError
from polar.engine.launch import LaunchError, check_model_folder, command, environment
from polar.settings import Settings, SettingsError, from_environment

log = logging.getLogger("polar.engine")

STOP_S = 10.0
START_S = 1800.0
"""A large model may take long to load."""
PR_SET_PDEATHSIG = 1
UNLABELLED = "default"


def die_with_parent(signal_number: int) -> None:
    """The kernel sends ``signal_number`` to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


def check_port_free(settings: Settings) -> None:
    address = urlsplit(settings.engine_url)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname or "127.0.0.1", address.port or 0))
        except OSError as error:
            raise LaunchError(f"cannot listen at {settings.engine_url}: {error.strerror}; free the port") from None


async def label_base_weights(url: str) -> None:
    """Waits until the engine is up; a fresh one samples from the base model, which is version 0."""
    async with EngineClient(url) as engine:
        try:
            await engine.wait_healthy(START_S)
            if await engine.weight_version() == UNLABELLED:
                await engine.set_weight_version(0)
        except EngineError as error:
            log.error("the weight version was not labelled: %s", error)
            return
        log.info("up at %s with weight version %s", url, await engine.weight_version())


async def run(settings: Settings) -> int:
    """vLLM's exit code, or 0 after SIGTERM or SIGINT."""
    check_model_folder(settings.model_dir)
    arguments = command(settings)
    check_port_free(settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    child = await asyncio.create_subprocess_exec(*arguments, env=environment(), start_new_session=True)
    exited, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
    guard = guard_group(child.pid)
    labelled = asyncio.create_task(label_base_weights(settings.engine_url))
    await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
    labelled.cancel()
    by_itself = exited.done()
    if not by_itself:
        child.send_signal(signal.SIGTERM)
        await asyncio.wait({exited}, timeout=STOP_S)
    guard.communicate()
    code = await exited
    if by_itself:
        log.error("vLLM ended by itself with code %s; its own messages stand above", code)
    return 1 if by_itself else 0


def guard_group(group: int) -> subprocess.Popen[bytes]:
    """A shell that kills the process group once this process closes its pipe, or is killed.

    vLLM's own children outlive a killed parent, so the death of one process would leave the others behind.
    """
    script = 'read -r _; kill -KILL "-$1" 2>/dev/null'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "guard", str(group)], stdin=subprocess.PIPE, start_new_session=True
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    die_with_parent(signal.SIGTERM)
    try:
        return asyncio.run(run(from_environment()))
    except (LaunchError, SettingsError) as error:
        log.error("%s", error)
        return 1
    except subprocess.SubprocessError as error:
        log.error("vLLM could not be started: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
