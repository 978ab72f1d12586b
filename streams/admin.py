"""Making the topics, waiting for a broker, and how far the groups are behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from streams.errors import KafkaUnavailable, StreamError, named
from streams.topics import TABLE

DEADLINE_S = 30.0


class PartitionLag(msgspec.Struct, frozen=True):
    """``begin`` is the first offset in the log, ``end`` the next to be written; ``committed`` is by group."""

    partition: int
    begin: int
    end: int
    committed: dict[str, int]


class TopicLag(msgspec.Struct, frozen=True):
    """``group_lags``: for each group, how many offsets it has not committed yet, over all partitions that it has."""

    topic: str
    partitions: list[PartitionLag]
    group_lags: dict[str, int]


async def create_topics(bootstrap: str, deadline_s: float = DEADLINE_S) -> list[str]:
    """Creates the topics of the table that are missing, and returns their names.

    Raises KafkaUnavailable, or StreamError when a topic exists with fewer or more partitions than the table says.
    """
    wanted = [
        # -1: as many replicas as the cluster's default.
        NewTopic(spec.name, spec.partitions, -1, replica_assignments={}, topic_configs=spec.config)
        for spec in TABLE.values()
    ]
    async with _admin(bootstrap, deadline_s, "creating the topics") as admin:
        response = await admin.create_topics(wanted)
        created = []
        for name, code, *message in response.topic_errors:
            if code == 0:
                created.append(name)
            elif for_code(code) is not TopicAlreadyExistsError:
                raise for_code(code)(f"{name}: {message[0] if message else ''}")
        await _wait_for_leaders(admin, bootstrap)
    return created


async def topic_lag(bootstrap: str, deadline_s: float = DEADLINE_S) -> list[TopicLag]:
    """Partitions, end offsets and group lags of each topic of the table that exists."""
    async with _admin(bootstrap, deadline_s, "asking for lags") as admin:
        existing = [t for t in await admin.describe_topics(list(TABLE)) if t["error_code"] == 0]
        commits = {}
        for group, *_ in await admin.list_consumer_groups():
            commits[group] = await admin.list_consumer_group_offsets(group)
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
        await consumer.start()
        try:
            tps = [TopicPartition(t["topic"], p["partition"]) for t in existing for p in t["partitions"]]
            begins, ends = await consumer.beginning_offsets(tps), await consumer.end_offsets(tps)
        finally:
            await consumer.stop()
    lags = []
    for topic in TABLE:
        partitions = [
            PartitionLag(
                tp.partition,
                begins[tp],
                ends[tp],
                {group: offsets[tp].offset for group, offsets in commits.items() if tp in offsets},
            )
            for tp in sorted(tps)
            if tp.topic == topic
        ]
        if partitions:
            lags.append(TopicLag(topic, partitions, _group_lags(partitions)))
    return lags


async def wait_ready(bootstrap: str, deadline_s: float = DEADLINE_S) -> None:
    """Returns when the broker answers a metadata request. Raises KafkaUnavailable at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            await _reach(bootstrap)
            async with _admin(bootstrap, max(0.1, end - time.monotonic()), "asking for metadata") as admin:
                await admin.describe_cluster()
            return
        except (OSError, KafkaUnavailable) as error:
            if time.monotonic() >= end:
                raise named(error, bootstrap, f"waiting {deadline_s:.0f} s for an answer") from error
            await asyncio.sleep(0.1)


async def _reach(bootstrap: str) -> None:
    """Raises OSError unless one of the addresses accepts a connection: quicker and quieter than the client."""
    refused: OSError = OSError(f"{bootstrap!r} is not host:port")
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            refused = error
        else:
            writer.close()
            return
    raise refused


async def _wait_for_leaders(admin: AIOKafkaAdminClient, bootstrap: str) -> None:
    while True:
        if await _all_led(admin, bootstrap):
            return
        await asyncio.sleep(0.05)


async def _all_led(admin: AIOKafkaAdminClient, bootstrap: str) -> bool:
    """Whether each partition of each topic has a leader."""
    for topic in await admin.describe_topics(list(TABLE)):
        spec = TABLE[topic["topic"]]
        if topic["error_code"] != 0 or any(p["leader"] < 0 for p in topic["partitions"]):
            return False
        if len(topic["partitions"]) != spec.partitions:
            raise StreamError(
                f"Kafka at {bootstrap}: {spec.name} has {len(topic['partitions'])} partitions, "
                f"not {spec.partitions}; delete the topic, or use another cluster"
            )
    return True


def _group_lags(partitions: list[PartitionLag]) -> dict[str, int]:
    lags: dict[str, int] = {}
    for partition in partitions:
        for group, committed in partition.committed.items():
            lags[group] = lags.get(group, 0) + max(0, partition.end - committed)
    return lags


@asynccontextmanager
async def _admin(bootstrap: str, deadline_s: float, doing: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client; everything inside has ``deadline_s``, and its errors are named."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, client_id="polar-admin", request_timeout_ms=10_000)
    try:
        async with asyncio.timeout(deadline_s):
            await admin.start()
            yield admin
    except (KafkaError, OSError) as error:
        raise named(error, bootstrap, doing) from error
    finally:
        await admin.close()
