"""The gateway's counts for Prometheus, in a registry of its own.

Each method costs about a microsecond: a label's series is looked up once and kept. The values of a label are bounded;
what comes after the first ``MOST_VALUES`` of one is counted as ``other``. Times are seconds.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

MOST_VALUES = 64

ADDED_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Buckets for the gateway's own time, of a few milliseconds."""
PUBLISH_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0)
"""Buckets for the time until Kafka acknowledges; after the last the producer gives up."""

M = TypeVar("M", Counter, Histogram)


class Series(Generic[M]):
    """The series of one metric, by the values of its labels."""

    def __init__(self, metric: M, labels: int) -> None:
        self._metric: M = metric
        self._known: dict[tuple[str, ...], M] = {}
        self._values: list[set[str]] = [set() for _ in range(labels)]

    def of(self, *labels: str) -> M:
        series = self._known.get(labels)
        return series if series is not None else self._new(labels)

    def _new(self, labels: tuple[str, ...]) -> M:
        bounded = tuple(self._bounded(place, value) for place, value in enumerate(labels))
        series = self._metric.labels(*bounded)
        if bounded == labels:
            self._known[labels] = series
        return series

    def _bounded(self, place: int, value: str) -> str:
        values = self._values[place]
        if value not in values and len(values) >= MOST_VALUES:
            return "other"
        values.add(value)
        return value


class Metrics:
    """Each call is told once as ``started`` and once as ``ended``; the rest where it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._in_flight = Gauge("polar_gateway_calls_in_flight", "Calls that run", registry=self.registry)
        self._calls = self._counter("calls", "Calls that ended, by outcome", "dialect", "outcome")
        self._refused = self._counter("refusals", "Requests that never became a call, by reason", "code")
        tokens = self._counter("tokens", "Tokens of the calls that were sampled", "kind")
        self._prompt, self._sampled = tokens.of("prompt"), tokens.of("sampled")
        retries = self._counter("retries", "Repeats of a request that got the first one's sample", "how")
        self._joined, self._replayed = retries.of("joined"), retries.of("replayed")
        self._auxiliary = self._counter("auxiliary_calls", "Calls that are no turn of the agent, by rule", "rule")
        self._splits = self._counter(
            "history_splits", "Prompts that do not go on from sampled ids, by reason", "reason"
        )
        added = self._histogram("added", "The gateway's time beyond the engine's", ADDED_S, "until")
        self._first_token, self._total = added.of("first_token"), added.of("end")
        self._publish = self._histogram("publish", "Time until Kafka acknowledged an event", PUBLISH_S, "event")

    def started(self) -> None:
        self._in_flight.inc()

    def ended(self, dialect: str, outcome: str) -> None:
        """``outcome`` is completed, undelivered, or the reason of the failure."""
        self._in_flight.dec()
        self._calls.of(dialect, outcome).inc()

    def refused(self, code: str) -> None:
        self._refused.of(code).inc()

    def tokens(self, prompt: int, sampled: int) -> None:
        self._prompt.inc(prompt)
        self._sampled.inc(sampled)

    def repeated(self, how: Literal["joined", "replayed"]) -> None:
        """A repeat joined the call that still ran, or got the answer of the one that had ended."""
        (self._joined if how == "joined" else self._replayed).inc()

    def auxiliary(self, rule: str) -> None:
        self._auxiliary.of(rule).inc()

    def split(self, reason: str) -> None:
        self._splits.of(reason).inc()

    def first_token(self, added_s: float) -> None:
        self._first_token.observe(max(0.0, added_s))

    def total(self, added_s: float) -> None:
        self._total.observe(max(0.0, added_s))

    def published(self, event: str, seconds: float) -> None:
        """``event`` is the record's type (``call.started`` …)."""
        self._publish.of(event).observe(seconds)

    def render(self) -> tuple[bytes, str]:
        """The body of ``/metrics`` and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, meaning: str, *labels: str) -> Series[Counter]:
        return Series(Counter(f"polar_gateway_{name}", meaning, labels, registry=self.registry), len(labels))

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Series[Histogram]:
        name = f"polar_gateway_{name}_seconds"
        return Series(Histogram(name, meaning, labels, registry=self.registry, buckets=buckets), len(labels))
