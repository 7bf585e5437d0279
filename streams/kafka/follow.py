"""Following whole topics: facts and compacted views.

A follower reads every partition of its topics from given offsets and hands the records over in batches, in
its own thread, in order within a partition. `barrier` waits until everything that was in the topics when it
was called has been applied: end offsets are asked once for all callers that wait at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import confluent_kafka

from schemas.settings import Kafka
from streams.kafka import config
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.messages import BarrierTimeout, KafkaFailed, Message, check, consume, from_client

BATCH = 2_000
METADATA_S = 30.0


class Follower:
    """One thread, one consumer.

    `apply` gets lists of messages; what it raises ends the follower, and every waiter is told.
    """

    def __init__(
        self,
        kafka: Kafka,
        client_id: str,
        topics: list[str],
        apply: Callable[[list[Message]], None],
        offsets: dict[TopicPartition, int] | None = None,
    ) -> None:
        self._kafka = kafka
        self._client_id = client_id
        self._topics = topics
        self._apply = apply
        self._admin = Admin(kafka, f"{client_id}-offsets")
        self._changed = threading.Condition()
        self._applied: dict[TopicPartition, int] = dict(offsets or {})
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{client_id}-follow", daemon=True)
        self._waiters: set[Callable[[], None]] = set()
        self._asking: asyncio.Task[dict[TopicPartition, int]] | None = None

    def start(self) -> None:
        """Find the partitions and begin; raises KafkaFailed when a topic does not exist."""
        counts = self._admin.partitions(self._topics)
        missing = [topic for topic in self._topics if topic not in counts]
        if missing:
            raise KafkaFailed(f"topics do not exist: {', '.join(missing)}; run `openrelay migrate`")
        partitions = [(topic, p) for topic, count in counts.items() for p in range(count)]
        first = self._admin.first_offsets(partitions)
        for partition in partitions:
            self._applied[partition] = max(self._applied.get(partition, 0), first[partition])
        self._thread.start()

    def stop(self) -> None:
        self._closing = True
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def failure(self) -> BaseException | None:
        """What ended the follower, if anything did."""
        return self._failure

    def applied(self) -> dict[TopicPartition, int]:
        """Per partition, the offset up to which (exclusive) everything is applied."""
        with self._changed:
            return dict(self._applied)

    def wait_caught_up(self, timeout_s: float) -> None:
        """Block until everything in the topics now is applied; raises BarrierTimeout, KafkaFailed."""
        deadline = time.monotonic() + timeout_s
        target = self._admin.end_offsets(self.applied())
        with self._changed:
            while not self._reached(target):
                self._raise_failure()
                if not self._changed.wait(timeout=max(0.0, deadline - time.monotonic())):
                    raise BarrierTimeout(f"{self._client_id}: not caught up within {timeout_s} s")

    async def barrier(self, timeout_s: float) -> None:
        """The same for an event loop; concurrent callers share one question to the broker."""
        loop = asyncio.get_running_loop()
        reached = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(reached.set)

        try:
            async with asyncio.timeout(timeout_s):
                target = await self._ends(timeout_s)
                with self._changed:
                    self._waiters.add(wake)
                while True:
                    reached.clear()
                    with self._changed:
                        self._raise_failure()
                        if self._reached(target):
                            return
                    await reached.wait()
        except TimeoutError:
            raise BarrierTimeout(f"{self._client_id}: not caught up within {timeout_s} s") from None
        finally:
            with self._changed:
                self._waiters.discard(wake)

    async def _ends(self, timeout_s: float) -> dict[TopicPartition, int]:
        """End offsets asked after this call began: a question under way is too old, the next is shared."""
        running = self._asking
        if running is not None and not running.done():
            with contextlib.suppress(KafkaFailed):
                await asyncio.shield(running)
        if self._asking is None or self._asking is running or self._asking.done():
            self._asking = asyncio.create_task(
                asyncio.to_thread(self._admin.end_offsets, self.applied(), timeout_s)
            )
        return await asyncio.shield(self._asking)

    def _reached(self, target: dict[TopicPartition, int]) -> bool:
        return all(self._applied[partition] >= end for partition, end in target.items())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise KafkaFailed(f"{self._client_id}: follower ended") from self._failure

    def _run(self) -> None:
        settings = config.consumer(self._kafka, self._client_id, self._client_id)
        consumer = confluent_kafka.Consumer(settings | {"enable.partition.eof": True})
        try:
            # Topics the client has not met are looked up first: otherwise it may wait a second for them.
            consumer.list_topics(timeout=METADATA_S)
            consumer.assign(
                [confluent_kafka.TopicPartition(t, p, offset) for (t, p), offset in self._applied.items()]
            )
            while not self._closing:
                self._step(consume(consumer, BATCH, 0.2))
        except BaseException as error:
            config.log.exception("%s: follower ended", self._client_id)
            with self._changed:
                self._failure = error
                self._wake()
        finally:
            consumer.close()

    def _step(self, raw: list[confluent_kafka.Message]) -> None:
        messages = []
        reached: dict[TopicPartition, int] = {}
        for record in raw:
            error = record.error()
            if error is None:
                messages.append(from_client(record))
                reached[(record.topic(), record.partition())] = record.offset() + 1
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                # The end can lie beyond the last record: compaction removes old tombstones.
                reached[(record.topic(), record.partition())] = record.offset()
            else:
                check(error)
        if messages:
            self._apply(messages)
        if reached:
            with self._changed:
                for partition, offset in reached.items():
                    self._applied[partition] = max(self._applied[partition], offset)
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._waiters:
            wake()
