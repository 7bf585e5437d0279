"""Client settings shared by every producer and consumer."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from schemas.settings import Kafka
from schemas.topics import MAX_MESSAGE_BYTES

SESSION_TIMEOUT_MS = 6_000
"""A dead member's partitions are handed on after this; measured 4.8-5.8 s in all."""

FETCH_BYTES = 4 * MAX_MESSAGE_BYTES

FAILURE_LOG_EVERY_S = 10.0

log = logging.getLogger("openrelay.kafka")


class _FewFailures(logging.Filter):
    """A broker that is away is reported many times a second by every connection: now and then is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("FAIL"):
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + FAILURE_LOG_EVERY_S
        return True


log.addFilter(_FewFailures())


def common(kafka: Kafka, client_id: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": kafka.bootstrap,
        "client.id": client_id,
        "logger": log,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        "socket.keepalive.enable": True,
        "topic.metadata.refresh.interval.ms": 30_000,
    }


def producer(kafka: Kafka, client_id: str) -> dict[str, Any]:
    return common(kafka, client_id) | {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 2,
        "compression.type": "lz4",
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "delivery.timeout.ms": 120_000,
        "queue.buffering.max.messages": 100_000,
        "queue.buffering.max.kbytes": 64 * 1024,
    }


def consumer(kafka: Kafka, client_id: str, group: str) -> dict[str, Any]:
    """A consumer that commits nothing by itself and starts at the beginning."""
    return common(kafka, client_id) | {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 500,
        "fetch.error.backoff.ms": 100,
        "fetch.queue.backoff.ms": 5,
        "fetch.message.max.bytes": 1024 * 1024,
        "fetch.max.bytes": FETCH_BYTES,
        "receive.message.max.bytes": 2 * FETCH_BYTES,
        "queued.min.messages": 5_000,
        "queued.max.messages.kbytes": 8 * 1024,
    }


def member(kafka: Kafka, group: str, instance: str, topics: Sequence[str]) -> dict[str, Any]:
    """A member of a group under a static id: restarted at once it has its partitions back in 0.7 s.

    The id names the topics too. A broker gives a static member that comes back what it had, and does not look
    whether it wants more now (KAFKA-12759): topics that are new would belong to nobody, for ever.
    """
    wanted = hashlib.sha256("\n".join(sorted(topics)).encode()).hexdigest()[:8]
    return consumer(kafka, f"openrelay-{instance}", group) | {
        "group.instance.id": f"{instance}-{wanted}",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": SESSION_TIMEOUT_MS,
        "heartbeat.interval.ms": 1_000,
        "max.poll.interval.ms": 300_000,
    }
