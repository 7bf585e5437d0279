"""Topics and offsets through the admin client."""

from __future__ import annotations

import time
from collections.abc import Iterable

import confluent_kafka
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from schemas.settings import Kafka, Settings
from schemas.topics import CATALOGUE, MAX_MESSAGE_BYTES, Topic, requests_topic
from streams.kafka import config
from streams.kafka.messages import KafkaFailed

REQUEST_TIMEOUT_S = 10.0
RETRY_S = 0.05

TopicPartition = tuple[str, int]


class Admin:
    """Answers questions about the cluster; every call blocks for one or two round trips."""

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._consumers: dict[str, confluent_kafka.Consumer] = {}
        """One for each group whose offsets were asked for."""
        self._client = AdminClient(config.common(kafka, client_id))

    def cluster_id(self) -> str:
        try:
            return str(self._client.list_topics(timeout=REQUEST_TIMEOUT_S).cluster_id)
        except confluent_kafka.KafkaException as error:
            raise KafkaFailed(f"cluster metadata: {error}") from error

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Number of partitions of each topic that exists."""
        known = self._topics()
        return {name: known[name] for name in topics if name in known}

    def topics(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._topics() if name.startswith(prefix))

    def _topics(self) -> dict[str, int]:
        try:
            metadata = self._client.list_topics(timeout=REQUEST_TIMEOUT_S)
        except confluent_kafka.KafkaException as error:
            raise KafkaFailed(f"topic metadata: {error}") from error
        return {name: len(topic.partitions) for name, topic in metadata.topics.items()}

    def end_offsets(
        self, partitions: Iterable[TopicPartition], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """The offset the next record of each partition will get."""
        return self._offsets(partitions, OffsetSpec.latest(), timeout_s)

    def first_offsets(
        self, partitions: Iterable[TopicPartition], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> dict[TopicPartition, int]:
        """The oldest offset each partition still has."""
        return self._offsets(partitions, OffsetSpec.earliest(), timeout_s)

    def _offsets(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec, timeout_s: float
    ) -> dict[TopicPartition, int]:
        """Leaders move, and a new topic has none for a moment: what failed is asked again until time is over.

        The client asks the leader it remembers, so it is made to look who that is now.
        """
        left = {confluent_kafka.TopicPartition(t, p): spec for t, p in partitions}
        found: dict[TopicPartition, int] = {}
        deadline = time.monotonic() + timeout_s
        while left:
            futures = self._client.list_offsets(left, request_timeout=timeout_s)
            for partition, future in futures.items():
                try:
                    found[(partition.topic, partition.partition)] = future.result().offset
                    del left[partition]
                except confluent_kafka.KafkaException as error:
                    if time.monotonic() > deadline:
                        where = f"{partition.topic}[{partition.partition}]"
                        raise KafkaFailed(f"offset of {where}: {error}") from error
            if left:
                time.sleep(RETRY_S)
                self._topics()
        return found

    def committed(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Committed offsets of a group; partitions without one are absent.

        A consumer that never joins the group asks: the admin client's requests to coordinators abort the
        process when the connection breaks under them (librdkafka 2.16, issue 4605).
        """
        asking = self._consumers.get(group)
        if asking is None:
            settings = config.consumer(self._kafka, self._client_id, group)
            asking = self._consumers[group] = confluent_kafka.Consumer(settings)
        wanted = [confluent_kafka.TopicPartition(t, p) for t, p in partitions]
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            try:
                answer = asking.committed(wanted, timeout=REQUEST_TIMEOUT_S)
                failed = next((p.error for p in answer if p.error is not None), None)
                if failed is not None:
                    raise confluent_kafka.KafkaException(failed)
                break
            except confluent_kafka.KafkaException as error:
                # A coordinator moves, or has just come back, and cannot be asked for a moment.
                if time.monotonic() > deadline:
                    raise KafkaFailed(f"committed offsets of {group}: {error}") from error
                time.sleep(RETRY_S)
        return {(p.topic, p.partition): p.offset for p in answer if p.offset >= 0}

    def create(self, topics: Iterable[tuple[Topic, int]], replication_factor: int) -> None:
        """Create what is missing, with the catalogue's settings; bring settings of the rest in line.

        Raises KafkaFailed for a topic whose number of partitions is another: everybody finds a batch by it.
        """
        wanted = {topic.name: (topic, count) for topic, count in topics}
        existing = self.partitions(wanted)
        for name, count in existing.items():
            topic, expected = wanted[name]
            if count != expected and topic.partitions != "requests":
                raise KafkaFailed(
                    f"topic {name} has {count} partitions; the settings say {expected}, which cannot be"
                )
        new = [
            NewTopic(
                name,
                num_partitions=count,
                replication_factor=replication_factor,
                config=_config(topic, replication_factor),
            )
            for name, (topic, count) in wanted.items()
            if name not in existing
        ]
        if new:
            for name, future in self._client.create_topics(
                new, operation_timeout=30, request_timeout=30
            ).items():
                try:
                    future.result()
                except confluent_kafka.KafkaException as error:
                    if error.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                        raise KafkaFailed(f"create topic {name}: {error}") from error
            self._await_leaders([topic.topic for topic in new])
        stale = [
            ConfigResource(
                ResourceType.TOPIC,
                name,
                incremental_configs=[
                    ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
                    for key, value in _config(wanted[name][0], replication_factor).items()
                ],
            )
            for name in existing
        ]
        if stale:
            futures = self._client.incremental_alter_configs(stale, request_timeout=30)
            for resource, future in futures.items():
                try:
                    future.result()
                except confluent_kafka.KafkaException as error:
                    raise KafkaFailed(f"configure topic {resource.name}: {error}") from error

    def _await_leaders(self, names: list[str], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            topics = self._client.list_topics(timeout=REQUEST_TIMEOUT_S).topics
            if all(
                name in topics
                and topics[name].partitions
                and all(p.leader >= 0 for p in topics[name].partitions.values())
                for name in names
            ):
                return
            time.sleep(0.05)
        raise KafkaFailed(f"topics without leader after {timeout_s} s: {', '.join(names)}")


def create_topics(settings: Settings) -> None:
    """Create every topic of the catalogue and the request topic of every model; safe to repeat."""
    kafka = settings.kafka
    counts = {"facts": 1, "results": kafka.partitions, "requests": kafka.request_partitions}
    topics = [*CATALOGUE, *(requests_topic(model) for model in settings.models)]
    admin = Admin(kafka, "openrelay-topics")
    admin.create([(topic, counts[topic.partitions]) for topic in topics], kafka.replication_factor)


def _config(topic: Topic, replication_factor: int) -> dict[str, str]:
    return topic.config | {
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": str(max(1, replication_factor - 1)),
    }
