"""FastStream on our topics: for services that handle one record at a time and keep no positions of their own.

FastStream's defaults commit before the handler has run, and start at the end of the log. Here a record is committed
after its handler, from the earliest on; one that fails is tried again, ``ATTEMPTS`` times in all, then put into
``polar.dead-letters``; a newer schema version stops the service.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiokafka.structs import ConsumerRecord
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker

from streams.codec import decode
from streams.dead_letters import put_aside, shout
from streams.errors import DecodeError, NewerSchemaError
from streams.topics import MIB

if TYPE_CHECKING:
    from faststream.kafka.subscriber.usecase import DefaultSubscriber
    from faststream.message import StreamMessage

ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
"""Before the second attempt; doubled for each further one."""

log = logging.getLogger(__name__)


def make_broker(bootstrap: str, source: str) -> KafkaBroker:
    """A broker whose handlers get records. ``source`` names the service. Publish with ``Producer``."""
    return KafkaBroker(
        bootstrap,
        client_id=source,
        decoder=_decode,
        ack_policy=AckPolicy.NACK_ON_ERROR,
        middlewares=[_PutAside(bootstrap, source)],
        acks="all",
        enable_idempotence=True,
        allow_auto_create_topics=False,
        request_timeout_ms=15_000,
        apply_types=False,
    )


def follow(broker: KafkaBroker, topic: str, *, group_id: str) -> DefaultSubscriber:
    """A subscriber of ``topic`` to decorate a handler with: committed records only, from the earliest."""
    return broker.subscriber(
        topic,
        group_id=group_id,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        ack_policy=AckPolicy.NACK_ON_ERROR,
        fetch_max_bytes=32 * MIB,
        max_partition_fetch_bytes=4 * MIB,
    )


async def _decode(message: StreamMessage[ConsumerRecord]) -> Any:
    raw = message.raw_message
    return decode(raw.topic, raw.value, raw.headers)


class _PutAside:
    """Counts the failures of the record that is being tried; makes one middleware for each delivery."""

    def __init__(self, bootstrap: str, source: str) -> None:
        self._bootstrap = bootstrap
        self._source = source
        self._failures: dict[tuple[str, int], tuple[int, int]] = {}

    def __call__(self, message: ConsumerRecord | None, *, context: Any) -> BaseMiddleware:
        return _Delivery(message, context=context, put_aside=self)

    async def failed(self, message: ConsumerRecord, error: BaseException) -> bool:
        """Whether the record is done with: it was put aside. Otherwise it comes again."""
        partition = (message.topic, message.partition)
        offset, failures = self._failures.get(partition, (message.offset, 0))
        failures = failures + 1 if offset == message.offset else 1
        if failures < ATTEMPTS and not isinstance(error, DecodeError):
            self._failures[partition] = (message.offset, failures)
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (failures - 1))
            return False
        self._failures.pop(partition, None)
        reason = f"{type(error).__name__}: {error}"
        shout(message, service=self._source, reason=reason)
        await put_aside(self._bootstrap, message, service=self._source, reason=reason)
        return True


class _Delivery(BaseMiddleware):
    def __init__(self, message: ConsumerRecord | None, /, *, context: Any, put_aside: _PutAside) -> None:
        super().__init__(message, context=context)
        self._put_aside = put_aside

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        if isinstance(exc_val, NewerSchemaError):
            log.critical("%s", exc_val)
            raise SystemExit(1) from exc_val
        if self.msg is None or not isinstance(exc_val, Exception):
            return False
        return await self._put_aside.failed(self.msg, exc_val)
