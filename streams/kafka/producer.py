"""Producers: every record's delivery is checked, a full queue is back-pressure.

`Producer` serves threads: `send` many, then `flush`, which raises if any of them failed.
`AsyncProducer` serves an event loop: `await send` returns when the broker has acknowledged. The client's
own AIOProducer refuses headers and takes 0.2-2 s per awaited send, so a poll thread hands the
acknowledgements over in bursts, one loop wake-up for all that have arrived.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import confluent_kafka

from schemas.settings import Kafka
from streams.kafka import config
from streams.kafka.messages import Delivery, DeliveryFailed

POLL_S = 0.1
OVERFLOW_RETRY_S = 0.02


class Producer:
    """Thread-safe. Records of one partition keep the order in which they were sent.

    Callbacks run in one thread, in the order of the acknowledgements, which is that of the partition: so
    nobody else may poll the client, and `flush` waits instead of flushing it.
    """

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._client = confluent_kafka.Producer(config.producer(kafka, client_id))
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._unacked = 0
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name=f"{client_id}-acks", daemon=True)
        self._poller.start()

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Queue one record; blocks while the queue is full.

        `on_delivery` runs in the poll thread once the record is acknowledged. A failure is reported to
        `on_failure` when given, else by the next `flush`.
        """
        while not self.offer(
            topic, value, key=key, partition=partition, on_delivery=on_delivery, on_failure=on_failure
        ):
            with self._changed:
                self._changed.wait(POLL_S)

    def offer(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: str | None = None,
        partition: int | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> bool:
        """Like `send`, but False at once when the queue is full."""

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                if on_failure is not None:
                    on_failure(str(error))
                elif self._failure is None:
                    self._failure = f"{topic}: {error}"
            elif on_delivery is not None:
                on_delivery(Delivery(topic, message.partition(), message.offset(), message.timestamp()[1]))
            with self._changed:
                self._unacked -= 1
                if not self._unacked:
                    self._changed.notify_all()

        arguments: dict[str, Any] = {"on_delivery": delivered}
        if partition is not None:
            arguments["partition"] = partition
        with self._changed:
            self._unacked += 1
        try:
            self._client.produce(topic, value, key, **arguments)
        except BaseException as error:
            with self._changed:
                self._unacked -= 1
            if isinstance(error, BufferError):
                return False
            raise
        return True

    def flush(self, timeout_s: float = 150.0) -> None:
        """Wait until everything sent is acknowledged.

        Raises DeliveryFailed when a record failed since the last flush or the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._unacked, timeout_s)
            waiting = self._unacked
        failure, self._failure = self._failure, None
        if failure is not None:
            raise DeliveryFailed(failure)
        if waiting:
            raise DeliveryFailed(f"{waiting} records not acknowledged within {timeout_s} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """Flush and stop the poll thread."""
        try:
            self.flush(timeout_s)
        finally:
            self._closing.set()
            self._poller.join()

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._client.poll(POLL_S)


class AsyncProducer:
    """For one event loop. Construct it inside the running loop.

    Records that find the queue full wait in order behind each other; callers bound what they have pending.
    """

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._producer = Producer(kafka, client_id)
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[asyncio.Future[Delivery], Delivery | str]] = deque()
        self._overflow: deque[Callable[[], bool]] = deque()
        self._all_queued = asyncio.Event()
        """Set while nothing waits for room in the queue."""
        self._all_queued.set()
        self._woken = False

    def submit(
        self, topic: str, value: bytes | None, *, key: str | None = None, partition: int | None = None
    ) -> asyncio.Future[Delivery]:
        """Queue one record now, in call order; the future ends with its delivery or DeliveryFailed."""
        future: asyncio.Future[Delivery] = self._loop.create_future()

        def arrived(outcome: Delivery | str) -> None:
            self._arrived.append((future, outcome))
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._drain)

        def offer() -> bool:
            return self._producer.offer(
                topic, value, key=key, partition=partition, on_delivery=arrived, on_failure=arrived
            )

        if self._overflow or not offer():
            self._overflow.append(offer)
            self._all_queued.clear()
            if len(self._overflow) == 1:
                self._loop.call_later(OVERFLOW_RETRY_S, self._offer_overflow)
        return future

    async def send(
        self, topic: str, value: bytes | None, *, key: str | None = None, partition: int | None = None
    ) -> Delivery:
        """Send one record and wait for its acknowledgement; raises DeliveryFailed."""
        return await self.submit(topic, value, key=key, partition=partition)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Flush and end; what waits for room in the queue is given the same time."""
        async with asyncio.timeout(timeout_s):
            await self._all_queued.wait()
        await self._loop.run_in_executor(None, self._producer.close, timeout_s)

    def _offer_overflow(self) -> None:
        while self._overflow:
            if not self._overflow[0]():
                self._loop.call_later(OVERFLOW_RETRY_S, self._offer_overflow)
                return
            self._overflow.popleft()
        self._all_queued.set()

    def _drain(self) -> None:
        self._woken = False
        while self._arrived:
            future, outcome = self._arrived.popleft()
            if future.done():
                continue
            if isinstance(outcome, Delivery):
                future.set_result(outcome)
            else:
                future.set_exception(DeliveryFailed(outcome))
