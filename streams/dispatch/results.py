"""Results on their way to the arbiter, in order within a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from schemas import topics
from schemas.ids import BatchId
from schemas.records import Result
from schemas.settings import Kafka
from streams.kafka.messages import Delivery
from streams.kafka.producer import AsyncProducer

MAX_UNACKED_BYTES = 32 * 1024 * 1024
"""Beyond it nothing new is started: the log is the bottleneck, or gone."""

_encode = msgspec.json.Encoder().encode


class Results:
    """For one event loop. A result that cannot be written is reported to `on_failed`."""

    def __init__(
        self, kafka: Kafka, producer: AsyncProducer, on_failed: Callable[[BaseException], None]
    ) -> None:
        self._partitions = kafka.partitions
        self._producer = producer
        self._on_failed = on_failed
        self._unacked: set[asyncio.Future[Delivery]] = set()
        self._unacked_bytes = 0

    @property
    def unacked_bytes(self) -> int:
        return self._unacked_bytes

    @property
    def congested(self) -> bool:
        return self._unacked_bytes >= MAX_UNACKED_BYTES

    def send(
        self, batch: BatchId, result: Result, acknowledged: Callable[[int], None]
    ) -> asyncio.Future[Delivery]:
        """Append behind everything sent for the batch before; `acknowledged` is told the offset after it."""
        value = _encode(result)
        sent = self._producer.submit(
            topics.RESULTS, value, key=batch, partition=topics.partition_of(batch, self._partitions)
        )
        self._unacked.add(sent)
        self._unacked_bytes += len(value)
        sent.add_done_callback(partial(self._done, len(value), acknowledged))
        return sent

    async def drained(self) -> None:
        """Return when everything sent so far is acknowledged or has failed."""
        if self._unacked:
            await asyncio.wait(set(self._unacked))

    def _done(self, size: int, acknowledged: Callable[[int], None], sent: asyncio.Future[Delivery]) -> None:
        self._unacked.discard(sent)
        self._unacked_bytes -= size
        if sent.cancelled():
            return
        error = sent.exception()
        if error is None:
            acknowledged(sent.result().offset + 1)
        else:
            self._on_failed(error)
