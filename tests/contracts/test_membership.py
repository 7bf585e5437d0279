"""Who owns which partitions, as a real broker gives them away."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from schemas.settings import Kafka
from streams.kafka import membership
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
        member = Membership(
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
        member.start()
        try:
            yield owned
        finally:
            member.stop()
        assert not failures


@pytest.fixture
def topics(broker: EmbeddedBroker) -> Topics:
    return Topics(broker)


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK_EVERY_S", 2 * membership.POLL_S)


def test_topics_that_are_new_at_a_restart_are_owned(broker: EmbeddedBroker) -> None:
    """A broker gives a static member that comes back what it had, whatever it asks for (KAFKA-12759).

    Of the only member of a group, and of one of two; both at once, since each waits for a session to run out.
    """
    lonely, shared = Topics(broker), Topics(broker)
    old, both = lonely.create("a"), shared.create("a")
    with shared.member("m-0") as first:
        with lonely.member("m-0") as alone, shared.member("m-1") as second:
            until(lambda: alone == old, 30, lambda: str(alone))
            until(lambda: first and second and first | second == both, 30, lambda: f"{first} {second}")
        old |= lonely.create("b")
        both |= shared.create("b")
        with lonely.member("m-0") as alone, shared.member("m-1") as second:
            until(lambda: alone == old, 30, lambda: str(alone))
            until(lambda: first | second == both, 30, lambda: f"{first} {second}")
            assert not first & second


@pytest.mark.usefixtures("looking_often")
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
            until(lambda: second == had, 30, lambda: str(second))
            assert first == kept
