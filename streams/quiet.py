"""Keeps aiokafka's log readable: while a broker is away it repeats the same lines ten times a second."""

from __future__ import annotations

import logging

INTERVAL_S = 10.0
LOGGERS = (
    "aiokafka",
    "aiokafka.client",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)


class OnceInAWhile(logging.Filter):
    """Lets each message (its template) of a logger through once in ``INTERVAL_S``."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg))
        if record.created - self._last.get(key, -INTERVAL_S) < INTERVAL_S:
            return False
        self._last[key] = record.created
        return True


def keep_quiet() -> None:
    """Filters aiokafka's loggers; calling it again changes nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, OnceInAWhile) for one in logger.filters):
            logger.addFilter(OnceInAWhile())
