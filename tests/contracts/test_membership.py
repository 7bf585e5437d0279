"""Who owns which partitions, as a real broker gives them away."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from schemas.settings import Kafka
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.membership import Membership
from tests.support.broker import EmbeddedBroker
from tests.support.until import until

PARTITIONS = 2


class Topics:
    """Topics of one test, and the members of a group that share them."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.kafka = Kafka(bootstrap=broker.bootstrap)
        self.prefix = f"test.membership.{secrets.token_hex(4)}."
        self.group = self.prefix
        self.admin = Admin(self.kafka, "test-membership")

    def create(self, *names: str) -> set[TopicPartition]:
        client = AdminClient({"bootstrap.servers": self.kafka.bootstrap})
        for created in client.create_topics(
            [NewTopic(self.prefix + name, PARTITIONS, 1) for name in names]
        ).values():
            created.result()
        made = {self.prefix + name for name in names}
        until(lambda: made <= set(self.admin.topics(self.prefix)), 30, "the topics are not there")
        return {(topic, p) for topic in made for p in range(PARTITIONS)}

    @contextmanager
    def member(self, instance: str) -> Iterator[set[TopicPartition]]:
        """What a member owns now. Its end is not told to the group, as when a process is killed."""
        owned: set[TopicPartition] = set()
        failures: list[BaseException] = []
        membership = Membership(
            self.kafka,
            self.group,
            instance,
            lambda: self.admin.topics(self.prefix),
            on_assigned=owned.update,
            on_revoked=owned.difference_update,
            on_lost=owned.difference_update,
            positions=dict,
            on_failed=failures.append,
        )
        membership.start()
        try:
            yield owned
        finally:
            membership.stop()
        assert not failures


@pytest.fixture
def topics(broker: EmbeddedBroker) -> Topics:
    return Topics(broker)


def owns(owned: set[TopicPartition], wanted: set[TopicPartition]) -> Callable[[], bool]:
    return lambda: owned == wanted


def test_topics_that_are_new_at_a_restart_are_owned(topics: Topics) -> None:
    """A broker gives a static member that comes back what it had, whatever it asks for (KAFKA-12759)."""
    old = topics.create("a")
    with topics.member("m-0") as owned:
        until(owns(owned, old), 30, lambda: str(owned))
    new = topics.create("b")
    with topics.member("m-0") as owned:
        until(owns(owned, old | new), 30, lambda: str(owned))


def test_topics_that_are_new_at_a_restart_of_one_of_two_are_owned(topics: Topics) -> None:
    old = topics.create("a")
    with topics.member("m-0") as first:
        with topics.member("m-1") as second:
            until(lambda: first and second and first | second == old, 30, lambda: f"{first} {second}")
        new = topics.create("b")
        with topics.member("m-1") as second:
            until(lambda: first | second == old | new, 30, lambda: f"{first} {second}")
            assert not first & second


def test_topics_that_come_while_members_run_are_owned(topics: Topics) -> None:
    old = topics.create("a")
    with topics.member("m-0") as first, topics.member("m-1") as second:
        until(lambda: first and second and first | second == old, 30, lambda: f"{first} {second}")
        new = topics.create("b")
        until(lambda: first | second == old | new, 30, lambda: f"{first} {second}")
        assert not first & second


def test_a_restart_without_new_topics_gives_back_what_it_had(topics: Topics) -> None:
    """Also with another member there, which keeps its own."""
    both = topics.create("a", "b")
    with topics.member("m-0") as first:
        with topics.member("m-1") as second:
            until(lambda: first and second and first | second == both, 30, lambda: f"{first} {second}")
            had, kept = set(second), set(first)
        with topics.member("m-1") as second:
            until(owns(second, had), 30, lambda: str(second))
            assert first == kept
