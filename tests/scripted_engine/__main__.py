"""``python tests/scripted_engine --port P``: serves until SIGTERM. Prints its address once it listens.

The reply is ``--reply TEXT``, or ``--plans FILE``: a JSON list of plans (the fields of ``plans.Plan``), the n-th for
the n-th call of a conversation, or a JSON object: the plan of each word that may end the last message, and of "" for
any other.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripted_engine import Plan, ScriptedEngine, Template, by_last_word, by_turn  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/scripted_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="policy")
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--reply", default="done")
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--thinks", action="store_true", help="has a parser of <think>")
    for habit in ("strip-reasoning", "reserialise", "no-think"):
        parser.add_argument(f"--{habit}", action="store_true", help="a habit of the chat template")
    options = parser.parse_args()
    try:
        plans: list[Plan] | dict[str, Plan] = [Plan(content=options.reply)]
        if options.plans is not None:
            plans = msgspec.json.decode(options.plans.read_bytes(), type=list[Plan] | dict[str, Plan])
    except (OSError, msgspec.MsgspecError) as error:
        print(f"error: {options.plans}: {error}", file=sys.stderr)
        return 1
    template = Template(
        strip_reasoning=options.strip_reasoning, reserialise=options.reserialise, no_think=options.no_think
    )
    engine = ScriptedEngine(
        by_last_word(plans) if isinstance(plans, dict) else by_turn(*plans),
        template=template,
        model=options.model,
        max_model_len=options.max_model_len,
        thinks=options.thinks,
        record=False,
    )
    uvloop.run(serve(engine, options.host, options.port))
    return 0


async def serve(engine: ScriptedEngine, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with engine.serving(host, port):
        print(engine.url, flush=True)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
