"""What the rest of the code relies on from the embedded broker."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from schemas.topics import MAX_MESSAGE_BYTES
from services.embedded import broker as embedded
from tests.support.broker import EmbeddedBroker


def _create(broker: EmbeddedBroker, name: str, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for done in admin.create_topics([NewTopic(name, 1, 1, config=config or {})]).values():
        done.result(10)


def _produce(broker: EmbeddedBroker, topic: str, values: list[bytes], timestamp: int = 0) -> None:
    failed: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "message.max.bytes": MAX_MESSAGE_BYTES + 16_384,
        }
    )
    for value in values:
        producer.produce(topic, value, timestamp=timestamp, on_delivery=lambda e, _: e and failed.append(e))
    assert producer.flush(30) == 0
    assert failed == []


def _read(broker: EmbeddedBroker, topic: str, count: int) -> list[object]:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "none", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        return list(consumer.consume(count, timeout=20))
    finally:
        consumer.close()


def test_a_kill_leaves_what_was_acknowledged_and_nothing_that_was_unpacked(broker: EmbeddedBroker) -> None:
    """What it unpacks lies beside the data, not among the temporary files of the machine."""
    _create(broker, "kept")
    _produce(broker, "kept", [b"%d" % n for n in range(1_000)])
    _create(broker, "unpacked", {"compression.type": "lz4"})
    _produce(broker, "unpacked", [b"x" * 1_000])
    temporaries = broker.directory / "tmp"
    left = set(temporaries.iterdir())
    assert left
    broker.kill()
    broker.start()
    assert not left & set(temporaries.iterdir())
    assert [m.value() for m in _read(broker, "kept", 1_000)] == [b"%d" % n for n in range(1_000)]


def test_times_of_record_are_the_brokers(broker: EmbeddedBroker) -> None:
    before = time.time() * 1000 - 5_000
    _create(broker, "timed")
    _produce(broker, "timed", [b"x"], timestamp=1_000)
    [message] = _read(broker, "timed", 1)
    kind, at = message.timestamp()
    assert kind == 2  # log append time
    assert at >= before


def test_the_largest_message_fits(broker: EmbeddedBroker) -> None:
    _create(broker, "large")
    _produce(broker, "large", [bytes(MAX_MESSAGE_BYTES)])
    [message] = _read(broker, "large", 1)
    assert len(message.value()) == MAX_MESSAGE_BYTES


def test_topics_are_not_made_by_accident(broker: EmbeddedBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "message.timeout.ms": 2_000})
    errors: list[object] = []
    producer.produce("never-created", b"x", on_delivery=lambda e, _: errors.append(e))
    producer.flush(10)
    assert errors
    assert errors[0] is not None


def test_a_static_member_that_restarts_has_its_partition_back_at_once(broker: EmbeddedBroker) -> None:
    _create(broker, "grouped")
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "slots",
        "group.instance.id": "slot-0",
        "session.timeout.ms": 45_000,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    _produce(broker, "grouped", [b"1"])
    first = Consumer(settings)
    first.subscribe(["grouped"])
    assert first.poll(20) is not None
    second = Consumer(settings)  # the same slot again, as after a kill: no leave, no session to wait for
    second.subscribe(["grouped"])
    assert second.poll(30) is not None
    second.close()
    first.close()


def test_broker_settings_in_force(broker: EmbeddedBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    resource = ConfigResource(ResourceType.BROKER, str(embedded.NODE_ID))
    values = {k: v.value for k, v in admin.describe_configs([resource])[resource].result(10).items()}
    wanted = {k: v for k, v in embedded.SETTINGS.items() if k in values}
    assert {k: values[k] for k in wanted} == wanted
    assert int(values["message.max.bytes"]) >= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("java.net.BindException: Address already in use", "port was taken"),
        ("Failed to acquire lock on file .lock in /x", "another broker"),
        ("java.io.IOException: No space left on device", "disk is full"),
        ("", "no message"),
    ],
)
def test_why_it_stopped_is_one_sentence(log: str, says: str) -> None:
    assert says in embedded.explain(log)
    assert "\n" not in embedded.explain(log)
