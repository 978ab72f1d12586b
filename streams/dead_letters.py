"""Putting a message aside that cannot be used: its original bytes, where it came from, why, and who says so."""

from __future__ import annotations

import logging

from aiokafka.structs import ConsumerRecord

from schemas.dead_letters import DeadLetter
from streams.producer import Producer
from streams.topics import DEAD_LETTERS

log = logging.getLogger(__name__)


def shout(message: ConsumerRecord, *, service: str, reason: str) -> None:
    """Logs that ``message`` is not used."""
    place = f"{message.topic}[{message.partition}]@{message.offset}"
    log.error("%s: %s is put aside: %s", service, place, reason)


async def put_aside(bootstrap: str, message: ConsumerRecord, *, service: str, reason: str) -> None:
    """Writes ``message`` to ``polar.dead-letters`` and waits for the acknowledgement.

    A message that is redelivered after a crash may stand there twice. Raises KafkaUnavailable.
    """
    letter = DeadLetter(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=message.key,
        value=message.value,
        headers=list(message.headers),
        service=service,
        reason=reason,
    )
    async with Producer(bootstrap, source=service) as producer:
        await producer.send(DEAD_LETTERS, letter)
