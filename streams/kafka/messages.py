"""What comes out of Kafka and what is known of what went in."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import confluent_kafka

log = logging.getLogger("openrelay.kafka")

_FATAL = confluent_kafka.KafkaError._FATAL
"""A fatal error seen a second time no longer says of itself that it is fatal."""


class Message(NamedTuple):
    """One record as read. `timestamp_ms` is the broker's append time."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: str | None
    value: bytes | None


class Delivery(NamedTuple):
    """Where and when an acknowledged record landed."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class KafkaFailed(Exception):
    """The cluster refused or did not answer; the process should stop and be started again."""


class DeliveryFailed(KafkaFailed):
    """A record was not acknowledged in time. It may or may not be in the log."""


class BarrierTimeout(KafkaFailed):
    """A follower did not reach the end of its topics in time."""


def from_client(message: Any) -> Message:
    """From a confluent_kafka message without error."""
    key = message.key()
    return Message(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        None if key is None else key.decode(),
        message.value(),
    )


def consume(client: Any, most: int, timeout_s: float) -> list[Any]:
    """What is there, at most `most` records, waiting at most `timeout_s` for the first one.

    The client's own `consume` waits for all of them or for the whole time.
    """
    first = client.poll(timeout_s)
    return [] if first is None else [first, *client.consume(most - 1, timeout=0)]


def check(error: Any) -> None:
    """Raise for an error the client does not recover from by itself; log the others."""
    if error is None:
        return
    if error.fatal() or error.code() == _FATAL:
        raise KafkaFailed(str(error))
    log.warning("consumer: %s", error)
