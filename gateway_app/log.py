"""Where the events of calls go: Kafka, or nowhere while capture is switched off."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway_app.metrics import Metrics
from schemas.record import Record
from streams.producer import Producer

PROMPT_S = 0.25


class KafkaLog:
    """Measures how long acknowledgements take, and knows by that whether Kafka is there."""

    def __init__(self, producer: Producer, metrics: Metrics) -> None:
        self._producer = producer
        self._metrics = metrics
        self._waiting: dict[asyncio.Future[Any], tuple[str, float]] = {}
        self._answered = False

    @property
    def flowing(self) -> bool:
        """Whether the last record was acknowledged, and none waits for longer than PROMPT_S."""
        oldest = next(iter(self._waiting.values()), None)
        return self._answered and (oldest is None or time.monotonic() - oldest[1] < PROMPT_S)

    async def post(self, topic: str, record: Record) -> asyncio.Future[Any]:
        began = time.monotonic()
        acknowledged = await self._producer.post(topic, record)
        self._waiting[acknowledged] = (str(record.__struct_config__.tag), began)
        acknowledged.add_done_callback(self._done)
        return acknowledged

    def _done(self, acknowledged: asyncio.Future[Any]) -> None:
        kind, began = self._waiting.pop(acknowledged)
        self._answered = not acknowledged.cancelled() and acknowledged.exception() is None
        self._metrics.published(kind, time.monotonic() - began)


class NoLog:
    """A plain proxy: nothing is captured, and nothing can be trained."""

    flowing = True

    async def post(self, topic: str, record: Record) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done
