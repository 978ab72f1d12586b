"""The demo run: start everything, measure held-out tasks, train, measure them again, write the report."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from polar.admin_api import AdminApi, ApiError
from polar.demo.config import DemoConfig, DemoError
from polar.demo.progress import Progress, Snapshot
from polar.demo.report import RunRecords, write_report
from polar.demo.result import DemoResult, Evaluation, evaluation, write_result
from polar.demo.tasks import held_out_tasks, train_tasks
from polar.stack import plan, point_latest
from polar.store.rows import BatchRow, ExclusionRow, GroupRow, SessionRow, Status, TaskRow, WeightRow
from polar.supervisor import Supervisor
from schemas.ids import derived_id
from schemas.tasks import TaskSpec

T = TypeVar("T")
LOOK_EVERY_S = 2.0
AWAY_S = 60.0
"""How long the admin app may take to come back."""
STALL_S = 240.0
"""Without any session ending for so long, nothing moves any more."""
REPORT_S = 40.0
"""For what is left when the second evaluation begins late: training that has to come to rest, and the report."""
MOST_ROWS = 5000


def run_demo(config: DemoConfig, folder: Path, console: Console | None = None) -> DemoResult:
    """Runs the demo in ``folder`` and leaves ``result.json`` and ``report.html`` there.

    Raises SettingsError, SupervisorError, ApiError or DemoError, each with one line; the data stays.
    """
    began = time.monotonic()
    console = console or Console()
    stack = plan(
        os.environ,
        run_dir=folder,
        seed=config.seed,
        learning_rate=config.learning_rate,
        batch_groups=config.batch_groups,
    )
    with stack.supervisor(os.environ) as supervisor:
        point_latest(stack.settings.run_dir)
        api = AdminApi(stack.settings.admin_url, stack.settings.admin_key)
        with Progress(console, config.steps, began) as progress:
            run = _Run(config, stack.settings.run_dir, supervisor, api, progress)
            progress.phase("starting " + ", ".join(service.name for service in stack.services))
            supervisor.start(progress.ready)
            result, records = run.all()
        progress.say("stopping")
    result = msgspec.structs.replace(result, seconds=time.monotonic() - began)
    write_result(stack.settings.run_dir / "result.json", result)
    report = write_report(stack.settings.run_dir / "report.html", result, records)
    for line in summary(result, report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return result


class _Run:
    """One run in progress."""

    def __init__(
        self, config: DemoConfig, folder: Path, supervisor: Supervisor, api: AdminApi, progress: Progress
    ) -> None:
        self._config = config
        self._folder = folder
        self._supervisor = supervisor
        self._api = api
        self._progress = progress
        self._policy = supervisor.environment["POLAR_POLICY"]
        self._submitted: list[str] = []

    def all(self) -> tuple[DemoResult, RunRecords]:
        self._check_broker()
        self._progress.phase("waiting for the engine to have version 0")
        self._until(lambda status: _loaded(status) is not None, "the engine has no weights")
        before = self._evaluate("before")
        self._progress.say(f"held-out pass@1 before: {_percent(before)}")
        reached = self._train(deadline=self._progress.began + self._config.budget_s - REPORT_S - 1.3 * before.seconds)
        if not reached:
            self._progress.say("the time is nearly over: training stops before its last step")
        excluded = Counter(row.reason for row in self._ask("/admin/exclusions", list[ExclusionRow], limit=MOST_ROWS))
        self._settle()
        after = self._evaluate("after")
        records = self._records()
        return self._result(before, after, records, excluded), records

    def _check_broker(self) -> None:
        """Raises DemoError when the broker holds another run. This one's first tasks are the held-out ones."""
        ends = {one["topic"]: one["partitions"] for one in self._ask("/admin/topics", list[dict[str, Any]])}
        if any(partition["end"] for partition in ends["polar.tasks"]):
            self._until(lambda _: bool(self._task_ids()), "the tasks on the broker are not recorded")
        known = self._task_ids()
        ours = {self._held_out_id("before", index) for index in range(self._config.held_out_sessions)}
        versions = [row for row in self._ask("/admin/weights", list[WeightRow], limit=MOST_ROWS) if row.version > 0]
        if (known or versions) and not known & ours:
            raise DemoError(
                f"Kafka already holds {len(known)} tasks and {len(versions)} weight versions of another run:"
                " give that run's --run-dir, or a POLAR_KAFKA_BOOTSTRAP without any"
            )

    def _task_ids(self) -> set[str]:
        return {task.task_id for task in self._ask("/admin/tasks", list[TaskRow], limit=MOST_ROWS)}

    def _held_out_id(self, phase: str, index: int) -> str:
        return derived_id("demo", str(self._folder), phase, index)

    def _evaluate(self, phase: str) -> Evaluation:
        """Held-out tasks, one sample each, under ids of their own; resubmitting them changes nothing."""
        began = time.monotonic()
        n = self._config.held_out_sessions
        tasks = [
            msgspec.structs.replace(task, task_id=self._held_out_id(phase, index))
            for index, task in enumerate(held_out_tasks(n, num_samples=1, policy=self._policy))
        ]
        self._progress.phase(f"{n} held-out tasks, {phase} training")
        self._submit(tasks)
        ids = {task.task_id for task in tasks}
        self._until(lambda _: len(self._closed(ids)) == n, "held-out sessions do not end")
        members = [member for group in self._closed(ids) for member in group.members]
        version = self._ask("/admin/status", Status).version_published or 0
        return evaluation(members, version, time.monotonic() - began)

    def _train(self, deadline: float) -> bool:
        """Keeps enough groups in work until the last version is loaded. False when the time was over before."""
        config = self._config
        self._progress.phase(f"training {config.steps} steps")
        upcoming = self._train_tasks()

        def done(status: Status) -> bool:
            closed = {group.group_id for group in self._groups() if group.closed_at} & set(self._submitted)
            if len(self._submitted) - len(closed) < 3 * config.batch_groups:
                self._submit([next(upcoming) for _ in range(config.batch_groups)], remember=True)
            return (_loaded(status) or 0) >= config.steps or time.monotonic() > deadline

        status = self._until(done, "no training session ends")
        return (_loaded(status) or 0) >= config.steps

    def _train_tasks(self) -> Any:
        wave = 0
        while True:
            seed = self._config.seed * 1000 + wave
            for index, task in enumerate(
                train_tasks(64, seed, num_samples=self._config.num_samples, policy=self._policy)
            ):
                identity = derived_id("demo", str(self._folder), "train", wave, index)
                yield msgspec.structs.replace(task, task_id=identity)
            wave += 1

    def _settle(self) -> None:
        """Ends what is left of training, so that one version alone is measured."""
        self._progress.phase("ending the training sessions that are left")
        closed = {group.group_id for group in self._closed(set(self._submitted))}
        for task_id in self._submitted:
            if task_id not in closed:
                self._retry(partial(self._api.delete, f"/admin/tasks/{task_id}"))
        ids = set(self._submitted)

        def quiet(status: Status) -> bool:
            waiting = len(self._closed(ids)) < len(ids)
            return not waiting and status.last_batch == (status.version_published or 0) == _loaded(status)

        self._until(quiet, "training does not come to rest")

    def _submit(self, tasks: Sequence[TaskSpec], *, remember: bool = False) -> None:
        self._retry(lambda: self._api.post("/admin/tasks", list(tasks)))
        if remember:
            self._submitted += [task.task_id for task in tasks]

    def _groups(self) -> list[GroupRow]:
        return self._ask("/admin/groups", list[GroupRow], limit=MOST_ROWS)

    def _closed(self, ids: set[str]) -> list[GroupRow]:
        return [group for group in self._groups() if group.closed_at and group.group_id in ids]

    def _until(self, condition: Callable[[Status], bool], stalled: str) -> Status:
        """Looks every second, keeps the services up and the display fresh. Raises DemoError when nothing moves."""
        moved, last = time.monotonic(), ""
        while True:
            self._supervisor.poll()
            status = self._ask("/admin/status", Status)
            self._progress.show(Snapshot(status=status, restarts=self._supervisor.restarts))
            if condition(status):
                return status
            if (now := _movement(status)) != last:
                moved, last = time.monotonic(), now
            elif time.monotonic() - moved > STALL_S:
                raise DemoError(f"{stalled}: nothing moved for {STALL_S:.0f} s; see {self._folder / 'logs'}")
            time.sleep(LOOK_EVERY_S)

    def _ask(self, path: str, kind: type[T], **query: Any) -> T:
        return self._retry(lambda: self._api.get(path, kind, **query))

    def _retry(self, ask: Callable[[], T]) -> T:
        """The admin app may be away while it is started again. Raises ApiError when it does not come back."""
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                return ask()
            except ApiError:
                if time.monotonic() > deadline or "admin" not in self._away():
                    raise
            time.sleep(0.5)

    def _away(self) -> list[str]:
        self._supervisor.poll()
        return self._supervisor.not_ready

    def _records(self) -> RunRecords:
        return RunRecords(
            weights=sorted(self._ask("/admin/weights", list[WeightRow], limit=MOST_ROWS), key=lambda row: row.version),
            batches=sorted(self._ask("/admin/batches", list[BatchRow], limit=MOST_ROWS), key=lambda row: row.batch),
            sessions=self._ask("/admin/sessions", list[SessionRow], limit=MOST_ROWS),
        )

    def _result(
        self, before: Evaluation, after: Evaluation, records: RunRecords, excluded: dict[str, int]
    ) -> DemoResult:
        """``excluded`` is from before the end, which cancels the groups that are left."""
        recomputed = [row.metrics["logprob_mismatch"] for row in records.weights if "logprob_mismatch" in row.metrics]
        probed = [load.probe_mean_difference for row in records.weights for load in row.loads]
        return DemoResult(
            config=self._config,
            run_dir=str(self._folder),
            before=before,
            after=after,
            pass_at_1_before=before.pass_at_1,
            pass_at_1_after=after.pass_at_1,
            version=after.version,
            seconds=0.0,
            mismatch_engine_trainer=_mean(probed),
            mismatch_captured_recomputed=_mean(recomputed),
            groups_trained=sum(row.groups for row in records.batches),
            groups_excluded=dict(excluded),
            restarts={name: count for name, count in self._supervisor.restarts.items() if count},
        )


def summary(result: DemoResult, report: Path) -> list[str]:
    """The lines that end a run."""
    points = 100 * (result.pass_at_1_after - result.pass_at_1_before)
    return [
        f"held-out pass@1 before  {_percent(result.before)}",
        f"held-out pass@1 after   {_percent(result.after)}   ({points:+.0f} points, weight version {result.version})",
        f"log-prob mismatch       engine ↔ trainer {_nats(result.mismatch_engine_trainer)},"
        f" captured ↔ recomputed {_nats(result.mismatch_captured_recomputed)} (mean, nats)",
        f"seconds                 {result.seconds:.0f}",
        f"report                  {report}",
    ]


def _percent(evaluated: Evaluation) -> str:
    low, high = evaluated.interval
    unscored = f", {evaluated.unscored} not scored" if evaluated.unscored else ""
    share = "–" if math.isnan(evaluated.pass_at_1) else f"{100 * evaluated.pass_at_1:.1f} %"
    interval = f"95 % interval {100 * low:.0f}–{100 * high:.0f} %"
    return f"{share}  ({evaluated.passed} of {evaluated.sessions}{unscored}; {interval})"


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _loaded(status: Status) -> int | None:
    """The version that every engine has reached."""
    return min(status.versions_loaded.values(), default=None)


def _movement(status: Status) -> str:
    return repr((status.sessions, status.groups, status.last_batch, status.version_published, status.versions_loaded))
