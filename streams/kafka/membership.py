"""Holding a share of topics without reading them.

The dispatcher reads by position with its own readers; the group only says whose partitions are whose.
Partitions stay paused, because seeking and pausing on one consumer stalls for seconds, and the thread
keeps polling, because a member that does not poll loses its partitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka

from schemas.settings import Kafka
from streams.kafka import config
from streams.kafka.admin import TopicPartition
from streams.kafka.messages import KafkaFailed, check

COMMIT_EVERY_S = 1.0
POLL_S = 0.2
LOOK_EVERY_S = 5.0
RENEW_EVERY_S = 60.0
"""A client that is fenced sooner after it was made anew has met another process with its id."""

FETCH_NOTHING = {"queued.min.messages": 1, "queued.max.messages.kbytes": 64, "fetch.message.max.bytes": 1024}
"""For a client that owns partitions without reading them."""


class Membership:
    """One thread. All callbacks run in it.

    `topics` is asked every few seconds which topics are to be shared, and may raise KafkaFailed.
    `on_revoked` may block for as long as running calls need to finish; heartbeats go on meanwhile.
    `positions` is asked about once a second for offsets to commit.
    """

    def __init__(
        self,
        kafka: Kafka,
        group: str,
        instance: str,
        topics: Callable[[], list[str]],
        *,
        on_assigned: Callable[[list[TopicPartition]], None],
        on_revoked: Callable[[list[TopicPartition]], None],
        on_lost: Callable[[list[TopicPartition]], None],
        positions: Callable[[], dict[TopicPartition, int]],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._kafka = kafka
        self._group = group
        self._instance = instance
        self._topics = topics
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._positions = positions
        self._on_failed = on_failed
        self._closing = threading.Event()
        self._committed: dict[TopicPartition, int] = {}
        self._held: set[TopicPartition] = set()
        self._thread = threading.Thread(target=self._run, name=f"{instance}-member", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give everything back (`on_revoked` runs) and end."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        renewed_at = float("-inf")
        try:
            while not self._closing.is_set():
                try:
                    self._hold()
                except KafkaFailed:
                    # A coordinator that moved may have given our id to a join of ours whose answer was
                    # lost: this client is fenced, the process need not end. The next time it is another's.
                    if time.monotonic() - renewed_at < RENEW_EVERY_S:
                        raise
                    renewed_at = time.monotonic()
                    config.log.warning("membership begins anew")
                    self._on_lost(sorted(self._held))
                    self._held.clear()
                    self._committed.clear()
        except BaseException as error:
            config.log.exception("membership ended")
            self._on_failed(error)

    def _hold(self) -> None:
        """Be a member until told to stop; raises KafkaFailed when the client is of no more use."""
        topics: list[str] = []
        while not (topics or self._closing.wait(POLL_S)):
            topics = self._known(topics)
        member = config.member(self._kafka, self._group, self._instance, topics)
        client = confluent_kafka.Consumer(member | FETCH_NOTHING)
        try:
            self._subscribe(client, topics)
            ticks_per_commit = round(COMMIT_EVERY_S / POLL_S)
            ticks_per_look = round(LOOK_EVERY_S / POLL_S)
            tick = 0
            while not self._closing.is_set():
                message = client.poll(POLL_S)
                if message is not None:
                    check(message.error())
                tick += 1
                if tick % ticks_per_commit == 0:
                    self._commit(client)
                if tick % ticks_per_look == 0 and (now := self._known(topics)) != topics:
                    topics = now
                    self._subscribe(client, topics)
        finally:
            client.close()

    def _known(self, before: list[str]) -> list[str]:
        """Which topics there are; those that were known `before` when there are none or nobody answers."""
        try:
            return self._topics() or before
        except KafkaFailed as error:
            config.log.warning("%s", error)
            return before

    def _subscribe(self, client: Any, topics: list[str]) -> None:
        client.subscribe(topics, on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)

    def _commit(self, client: Any) -> None:
        moved = {p: o for p, o in self._positions().items() if self._committed.get(p) != o}
        if not moved:
            return
        offsets = [confluent_kafka.TopicPartition(t, p, o) for (t, p), o in moved.items()]
        try:
            client.commit(offsets=offsets, asynchronous=False)
        except confluent_kafka.KafkaException as error:
            # Only what lag tools see depends on it; the next tick tries again.
            config.log.warning("commit: %s", error)
            if error.args[0].fatal():
                raise KafkaFailed(str(error)) from error
        else:
            self._committed |= moved

    def _assign(self, client: Any, partitions: list[Any]) -> None:
        parked = [
            confluent_kafka.TopicPartition(p.topic, p.partition, confluent_kafka.OFFSET_END)
            for p in partitions
        ]
        client.incremental_assign(parked)
        if parked:
            client.pause(parked)
        assigned = [(p.topic, p.partition) for p in partitions]
        self._held.update(assigned)
        self._on_assigned(assigned)

    def _revoke(self, client: Any, partitions: list[Any]) -> None:
        given_up = [(p.topic, p.partition) for p in partitions]
        self._on_revoked(given_up)
        self._held.difference_update(given_up)
        self._commit(client)
        for partition in given_up:
            self._committed.pop(partition, None)
        client.incremental_unassign(partitions)

    def _lose(self, client: Any, partitions: list[Any]) -> None:
        lost = [(p.topic, p.partition) for p in partitions]
        self._held.difference_update(lost)
        self._on_lost(lost)
        client.incremental_unassign(partitions)
