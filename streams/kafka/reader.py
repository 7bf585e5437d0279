"""Reading given ranges of partitions, with a few pooled consumers.

A consumer assigned to one partition at an offset delivers a chunk in about 5 ms whether it holds 20 records
or 300; assigning many partitions at once or seeking on a shared consumer takes far longer. So each read
assigns one idle consumer anew.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import confluent_kafka

from schemas.settings import Kafka
from schemas.topics import MAX_MESSAGE_BYTES
from streams.kafka import config
from streams.kafka.messages import KafkaFailed, Message, check, from_client

METADATA_S = 10.0


class PositionReader:
    """Thread-safe; at most `size` reads run at a time, further callers wait."""

    def __init__(self, kafka: Kafka, client_id: str, size: int) -> None:
        settings = config.consumer(kafka, client_id, client_id) | {
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 5,
            "fetch.queue.backoff.ms": 2,
            "queued.min.messages": 200,
            "fetch.message.max.bytes": MAX_MESSAGE_BYTES,
            "fetch.max.bytes": MAX_MESSAGE_BYTES,
        }
        self._consumers = [confluent_kafka.Consumer(settings) for _ in range(size)]
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._known: dict[int, set[str]] = {id(consumer): set() for consumer in self._consumers}
        for consumer in self._consumers:
            self._idle.put(consumer)

    def read(
        self, topic: str, partition: int, first: int, last: int, *, most: int, timeout_s: float
    ) -> list[Message]:
        """The records from `first` to at most `last` (inclusive), at most `most` and at least one of them.

        Raises KafkaFailed when none arrives in time or the offset is no longer there.
        """
        consumer = self._idle.get()
        try:
            self._assign(consumer, topic, partition, first)
            return self._collect(consumer, first, last, min(most, last - first + 1), timeout_s)
        finally:
            consumer.unassign()
            self._idle.put(consumer)

    def read_to_end(
        self, topic: str, partition: int, first: int, end: int, timeout_s: float
    ) -> list[Message]:
        """Everything from `first` up to offset `end` (exclusive) that compaction has left."""
        if first >= end:
            return []
        consumer = self._idle.get()
        deadline = time.monotonic() + timeout_s
        found: list[Message] = []
        try:
            self._assign(consumer, topic, partition, first)
            while time.monotonic() < deadline:
                # It returns when it has as many or the time is over, not at the end of the partition.
                for record in consumer.consume(2_000, timeout=0.05):
                    error = record.error()
                    if error is None:
                        if record.offset() < end:
                            found.append(from_client(record))
                        if record.offset() >= end - 1:
                            return found
                    elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                        return found
                    else:
                        _check(error)
        finally:
            consumer.unassign()
            self._idle.put(consumer)
        raise KafkaFailed(f"{topic}[{partition}]: end {end} not reached within {timeout_s} s")

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()

    def _assign(self, consumer: Any, topic: str, partition: int, offset: int) -> None:
        """A topic the client has not met before is looked up first: otherwise it may wait a second for it."""
        known = self._known[id(consumer)]
        if topic not in known:
            try:
                consumer.list_topics(topic, timeout=METADATA_S)
            except confluent_kafka.KafkaException as error:
                raise KafkaFailed(f"metadata of {topic}: {error}") from error
            known.add(topic)
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, offset)])

    def _collect(self, consumer: Any, first: int, last: int, most: int, timeout_s: float) -> list[Message]:
        deadline = time.monotonic() + timeout_s
        found: list[Message] = []
        while time.monotonic() < deadline:
            for record in consumer.consume(most - len(found), timeout=0.05):
                error = record.error()
                if error is not None:
                    if error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                        _check(error)
                    continue
                if record.offset() < first:
                    continue
                if record.offset() > last:
                    return found
                found.append(from_client(record))
                if record.offset() == last or len(found) == most:
                    return found
            if found:
                return found
        raise KafkaFailed(f"no record up to offset {last} within {timeout_s} s")


def _check(error: Any) -> None:
    if error.code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET:
        raise KafkaFailed(f"offset no longer in the log: {error}")
    check(error)
