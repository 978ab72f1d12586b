"""Every agent program, unmodified, from a task on Kafka to its trace: file written, session scored, ids those sampled.

Against the scripted engine in both modes, and against real vLLM, whose replies a structured output forces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fixture import engine_process, free_port
from tiny_model import build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "node"), str(ROOT / "tests" / "gateway")]

from engine_proxy import EngineProxy  # noqa: E402
from harness_scripts import SCRIPTS  # noqa: E402
from harness_stage import Row, stage  # noqa: E402

from benchmarks.harnesses import run  # noqa: E402
from schemas.tasks import HarnessSpec  # noqa: E402

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

CONTEXT = 131_072
VOCABULARY = 4096


def explain(rows: list[Row]) -> str:
    return "\n\n".join(f"{row.harness}: {row}" for row in rows if not row.green)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("mode", ["exact", "chat"])
async def test_each_program_on_the_scripted_engine(mode: str) -> None:
    rows = await run(list(SCRIPTS), [mode])
    assert all(row.green for row in rows), explain(rows)
    assert len(rows) == 8
    turns = {name: len(turns) for name, turns in SCRIPTS.items()}
    assert {row.harness: row.calls - row.auxiliary for row in rows} == turns
    if mode == "exact":
        assert {row.harness: row.exact_calls for row in rows} == {name: count - 1 for name, count in turns.items()}


@pytest.fixture(scope="module")
def wide_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Real vLLM with a context that holds what the programs send, and tokens of some letters each."""
    folder = tmp_path_factory.mktemp("wide")
    texts = [path.read_text() for path in sorted(ROOT.glob("*/*.py"))[:120]]
    model = build_model(folder / "model", seed=5, context=CONTEXT, tokenizer=build_tokenizer(texts, VOCABULARY))
    url = f"http://127.0.0.1:{free_port()}"
    with engine_process(folder, model, url):
        yield url


def text_of(turn: dict[str, Any]) -> str:
    """A reply as the model writes it."""
    calls = [json.dumps(call) for call in turn["tool_calls"]]
    return (turn["content"] or "") + "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_each_program_on_real_vllm(tmp_path: Path, wide_engine: str) -> None:
    proxy, rows = EngineProxy(wide_engine), []
    async with proxy.running(), stage(tmp_path, proxy.url, "exact") as ready:
        for name, turns in SCRIPTS.items():
            begun = len(proxy.streams)

            def forced(body: dict[str, Any], begun: int = begun, turns: list[Any] = turns) -> dict[str, Any]:
                text = text_of(turns[min(len(proxy.streams) - begun, len(turns) - 1)])
                body["sampling_params"] |= {"structured_outputs": {"choice": [text]}}
                return body

            proxy.regenerate = forced
            rows.append(await ready.run(HarnessSpec(name=name), lambda: sampled(proxy)))
    assert all(row.green for row in rows), explain(rows)


def sampled(proxy: EngineProxy) -> list[tuple[list[int], list[int]]]:
    return [(proxy.prompt(index), proxy.sampled(index)[0]) for index in range(len(proxy.streams))]


def test_a_row_is_green_only_if_all_of_it_is() -> None:
    fields = {
        "harness": "x",
        "mode": "exact",
        "calls": 2,
        "auxiliary": 0,
        "traces": 1,
        "exact_calls": 1,
        "seconds": 1.0,
    }
    good = Row(**fields, exit_code=0, reward=1.0, ids_equal=True)
    bad = [{"exit_code": 1}, {"reward": 0.0}, {"ids_equal": False}, {"traces": 2}, {"calls": 0}, {"exit_code": None}]
    whole = {**fields, "exit_code": 0, "reward": 1.0, "ids_equal": True}
    assert good.green and not any(Row(**(whole | wrong)).green for wrong in bad)
