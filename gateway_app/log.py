"""Where the events of calls go: Kafka, or nowhere while capture is switched off."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway_app.metrics import Metrics
from schemas.record import Record
from streams.producer import Producer


class KafkaLog:
    """Measures how long an acknowledgement takes."""

    def __init__(self, producer: Producer, metrics: Metrics) -> None:
        self._producer = producer
        self._metrics = metrics

    async def post(self, topic: str, record: Record) -> asyncio.Future[Any]:
        began, kind = time.monotonic(), str(record.__struct_config__.tag)
        acknowledged = await self._producer.post(topic, record)
        acknowledged.add_done_callback(lambda _: self._metrics.published(kind, time.monotonic() - began))
        return acknowledged


class NoLog:
    """A plain proxy: nothing is captured, and nothing can be trained."""

    async def post(self, topic: str, record: Record) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done
