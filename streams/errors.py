"""What can go wrong at the boundary to Kafka, one name for each thing that a caller would do differently.

aiokafka's own errors are turned into these in one place (``named``).
"""

from __future__ import annotations

from aiokafka import errors as kafka

from streams.quiet import keep_quiet

keep_quiet()


class StreamError(Exception):
    """Any of the errors below. The message is one line: what failed, where, what to do."""


class KafkaUnavailable(StreamError):
    """The broker did not answer, or did not acknowledge, within the deadline.

    What was being sent may or may not have been written: start again from what the log says.
    """


class Fenced(StreamError):
    """A newer process uses the same transactional id. Nothing of the open transaction is visible: stop."""


class Rebalanced(StreamError):
    """The partitions were given to another member of the group before the commit: nothing was committed."""


class OffsetLost(StreamError):
    """The position to read from is not in the log: it was deleted by retention, or belongs to another log."""


class RecordRefused(StreamError):
    """A record that the topic does not take: too large, or of a type that is not the topic's."""


class DecodeError(StreamError):
    """Bytes that are no record of this topic."""


class NewerSchemaError(StreamError):
    """A record written with a newer major schema version: this program must be updated, it never guesses."""


KNOWN: tuple[tuple[tuple[type[Exception], ...], type[StreamError], str], ...] = (
    (
        (kafka.ProducerFenced, kafka.InvalidProducerEpoch, kafka.InvalidProducerIdMapping, kafka.InvalidTxnState),
        Fenced,
        "a newer process with the same transactional id has taken over; this one must stop",
    ),
    (
        (
            kafka.CommitFailedError,
            kafka.IllegalGenerationError,
            kafka.UnknownMemberIdError,
            kafka.RebalanceInProgressError,
        ),
        Rebalanced,
        "the group has given the partitions to another member",
    ),
    (
        (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError, kafka.RecordTooLargeError),
        RecordRefused,
        "the record is larger than the topic takes",
    ),
    (
        (kafka.OffsetOutOfRangeError, kafka.NoOffsetForPartitionError),
        OffsetLost,
        "the log does not hold that offset",
    ),
    (
        (kafka.UnknownTopicOrPartitionError,),
        KafkaUnavailable,
        "the topic does not exist; python -m streams.broker and the admin app create the topics when they start",
    ),
)
"""Which of aiokafka's errors becomes which of ours, and what is said."""


def named(error: BaseException, bootstrap: str, doing: str) -> StreamError:
    """The named error for what aiokafka raised (or a deadline) while ``doing`` something with ``bootstrap``."""
    for cause in _chain(error):
        if isinstance(cause, StreamError):
            return cause
        for kinds, kind, advice in KNOWN:
            if isinstance(cause, kinds):
                return kind(f"Kafka at {bootstrap}: {doing} failed: {advice} ({_text(cause)})")
    return KafkaUnavailable(
        f"Kafka at {bootstrap}: {doing} failed: {_text(error)}; "
        "check that the broker runs (python -m streams.broker) and that POLAR_KAFKA_BOOTSTRAP names it"
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _text(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer within the deadline"
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
