"""``python -m benchmarks.demo --seeds 3 --json``: the demo over seeds, and a control whose learning rate is 0.

Prints one JSON object on the last line of stdout. ``pass_at_1_before``, ``pass_at_1_after`` and ``seconds`` are means
over the seeds; ``control_after`` is the control's. The lists hold each seed's own, in the order of ``seeds``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from polar.admin_api import ApiError
from polar.cli.run import stopping_by_signal
from polar.demo.config import DemoConfig, DemoError
from polar.demo.result import DemoResult
from polar.demo.run import run_demo
from polar.settings import SettingsError
from polar.supervisor import SupervisorError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds: 0, 1, 2 …")
    parser.add_argument("--steps", type=int, default=DemoConfig().steps)
    parser.add_argument("--learning-rate", type=float, default=DemoConfig().learning_rate)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S"))
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    console = Console(stderr=True, soft_wrap=True)
    results = []
    with stopping_by_signal():
        try:
            for name, config in runs(options.seeds, options.steps, options.learning_rate).items():
                folder = options.run_dir / name
                console.print(f"seed {config.seed}, learning rate {config.learning_rate:g}, in {folder}")
                results.append(run_demo(config, folder, console))
        except (SettingsError, SupervisorError, ApiError, DemoError) as error:
            console.print(f"error: {error}", markup=False)
            return 1
        except OSError as error:
            console.print(f"error: {error.filename or options.run_dir}: {error.strerror or error}", markup=False)
            return 1
        except KeyboardInterrupt:
            return 130
    found = summarise(results[:-1], results[-1])
    for name, value in {} if options.json else found.items():
        print(f"{name:<18}{value}")
    if options.json:
        print(msgspec.json.encode(found).decode())
    return 0


def runs(seeds: int, steps: int, learning_rate: float) -> dict[str, DemoConfig]:
    """Each run by the name of its folder, the control last."""
    configs = {f"seed-{seed}": DemoConfig(seed=seed, steps=steps, learning_rate=learning_rate) for seed in range(seeds)}
    return {**configs, "control": DemoConfig(seed=0, steps=steps, learning_rate=0.0)}


def summarise(seeds: list[DemoResult], control: DemoResult) -> dict[str, Any]:
    """The JSON object; NaN, which JSON writes as null, where no session was scored."""
    before = [result.pass_at_1_before for result in seeds]
    after = [result.pass_at_1_after for result in seeds]
    return {
        "pass_at_1_before": statistics.fmean(before),
        "pass_at_1_after": statistics.fmean(after),
        "control_after": control.pass_at_1_after,
        "seconds": statistics.fmean(result.seconds for result in seeds),
        "control_before": control.pass_at_1_before,
        "seeds": [result.config.seed for result in seeds],
        "before": before,
        "after": after,
        "versions": [result.version for result in seeds],
        "seconds_each": [result.seconds for result in [*seeds, control]],
        "mismatch_captured_recomputed": [result.mismatch_captured_recomputed for result in seeds],
        "mismatch_engine_trainer": [result.mismatch_engine_trainer for result in seeds],
    }


if __name__ == "__main__":
    sys.exit(main())
