"""Tasks come in: each id is published once.

Submitting the same task again is no new task; another task under a known id is refused.
"""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
from litestar.exceptions import HTTPException, NotFoundException

from schemas.tasks import TaskCancelled, TaskRecord, TaskSpec, TaskSubmitted
from streams.consumer import Reader
from streams.producer import Producer
from streams.topics import TASKS


class Submitted(msgspec.Struct, frozen=True):
    """The ids in the order of the request; ``new`` holds those that were not known before."""

    task_ids: list[str]
    new: list[str]


class Cancelled(msgspec.Struct, frozen=True):
    task_id: str
    new: bool


class TaskConflict(HTTPException):
    """A known task id with another task under it."""

    status_code = 409


class TaskIntake:
    """Publishes to ``polar.tasks``, knowing what stands there already. The admin app is the topic's only writer."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._digests: dict[str, bytes] = {}
        self._cancelled: set[str] = set()
        self._lock = asyncio.Lock()

    async def catch_up(self, bootstrap: str, source: str) -> None:
        """Reads the whole topic. Raises KafkaUnavailable."""
        async with Reader(bootstrap, [TASKS], source=source, start="beginning") as reader:
            async for chunk in reader.chunks_to_end():
                for received in chunk:
                    self.fold(received.record)

    def fold(self, record: TaskRecord) -> None:
        match record:
            case TaskSubmitted(task=task):
                self._digests.setdefault(task.task_id, _digest(task))
            case TaskCancelled(task_id=task_id):
                self._cancelled.add(task_id)

    async def submit(self, tasks: list[TaskSpec]) -> Submitted:
        """Returns when Kafka has them. Raises TaskConflict before anything is published, KafkaUnavailable."""
        async with self._lock:
            for task in tasks:
                if self._digests.get(task.task_id, _digest(task)) != _digest(task):
                    raise TaskConflict(
                        f"task {task.task_id} exists and is another one: submit under a new task_id, or leave it out"
                    )
            new = [task for task in tasks if task.task_id not in self._digests]
            records = [TaskSubmitted(task=task) for task in new]
            acknowledgements = [await self._producer.post(TASKS, record) for record in records]
            for record, acknowledged in zip(records, acknowledgements, strict=True):
                await acknowledged
                self.fold(record)
        return Submitted(task_ids=[task.task_id for task in tasks], new=[task.task_id for task in new])

    async def cancel(self, task_id: str) -> Cancelled:
        """Raises NotFoundException for an id that was never submitted, KafkaUnavailable."""
        async with self._lock:
            if task_id not in self._digests:
                raise NotFoundException(f"no task {task_id}: list them with GET /admin/tasks")
            if task_id in self._cancelled:
                return Cancelled(task_id=task_id, new=False)
            record = TaskCancelled(task_id=task_id)
            await self._producer.send(TASKS, record)
            self.fold(record)
        return Cancelled(task_id=task_id, new=True)


def _digest(task: TaskSpec) -> bytes:
    return hashlib.sha256(msgspec.json.encode(task)).digest()
