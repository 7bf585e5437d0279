"""Reading a share of topics as a member of a consumer group.

The stage decides where each partition starts (its own durable state knows better than the committed
offset), and gives partitions back in `on_revoked`, where it still may commit. The range assignor gives
partition p of every topic of one subscription to the same member, which the sink relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import confluent_kafka

from schemas.settings import Kafka
from streams.kafka import config
from streams.kafka.admin import TopicPartition
from streams.kafka.messages import KafkaFailed, Message, check, consume, from_client

Assigned = Callable[[dict[TopicPartition, int]], dict[TopicPartition, int]]
Revoked = Callable[[list[TopicPartition]], None]


class GroupReader:
    """For one thread. Callbacks run inside `consume`.

    `on_assigned` gets the committed offset of each partition (0 where there is none) and returns where to
    start. `on_revoked` is called before partitions are given up, `on_lost` after they were taken away:
    then nothing may be committed any more, though what is still produced is harmless (see the arbiter).
    """

    def __init__(
        self,
        kafka: Kafka,
        group: str,
        instance: str,
        topics: list[str],
        *,
        on_assigned: Assigned,
        on_revoked: Revoked,
        on_lost: Revoked,
    ) -> None:
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        settings = config.member(kafka, group, instance, topics)
        self._client = confluent_kafka.Consumer(settings | {"partition.assignment.strategy": "range"})
        self._client.subscribe(topics, on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)

    def consume(self, most: int, timeout_s: float) -> list[Message]:
        """Up to `most` records, waiting at most `timeout_s`; raises KafkaFailed."""
        messages = []
        for record in consume(self._client, most, timeout_s):
            error = record.error()
            if error is None:
                messages.append(from_client(record))
            else:
                check(error)
        return messages

    def commit(self, offsets: dict[TopicPartition, int]) -> bool:
        """Commit; False when the group has moved on and the offsets no longer are ours to commit."""
        if not offsets:
            return True
        try:
            self._client.commit(
                offsets=[confluent_kafka.TopicPartition(t, p, o) for (t, p), o in offsets.items()],
                asynchronous=False,
            )
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() in _MOVED_ON:
                config.log.warning("commit refused: %s", error.args[0])
                return False
            raise KafkaFailed(f"commit: {error}") from error
        return True

    def close(self) -> None:
        """Leave; `on_revoked` runs."""
        self._client.close()

    def _assign(self, client: Any, partitions: list[Any]) -> None:
        committed = client.committed(partitions, timeout=30) if partitions else []
        known = {(p.topic, p.partition): max(0, p.offset) for p in committed}
        starts = self._on_assigned(known)
        client.assign([confluent_kafka.TopicPartition(t, p, o) for (t, p), o in starts.items()])

    def _revoke(self, client: Any, partitions: list[Any]) -> None:
        self._on_revoked([(p.topic, p.partition) for p in partitions])
        client.unassign()

    def _lose(self, client: Any, partitions: list[Any]) -> None:
        self._on_lost([(p.topic, p.partition) for p in partitions])
        client.unassign()


_MOVED_ON = {
    confluent_kafka.KafkaError.ILLEGAL_GENERATION,
    confluent_kafka.KafkaError.UNKNOWN_MEMBER_ID,
    confluent_kafka.KafkaError.REBALANCE_IN_PROGRESS,
    confluent_kafka.KafkaError.FENCED_INSTANCE_ID,
    confluent_kafka.KafkaError._ASSIGNMENT_LOST,
    confluent_kafka.KafkaError._STATE,
}
