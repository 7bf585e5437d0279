"""The log of done-sets: written a little behind the results, read when a partition is assigned.

A done-set says up to which offset of `results` it knows everything. What lies beyond is read from there, so
that a crash repeats only the calls whose result was not acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from schemas import topics
from schemas.ids import BatchId
from schemas.records import Closed, DoneSet, Result, Step
from schemas.settings import Kafka
from streams.core import bitmap
from streams.core.lanes import Lane, done_key
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.messages import Delivery
from streams.kafka.producer import AsyncProducer
from streams.kafka.reader import PositionReader

WRITE_EVERY_S = 0.25
"""A done-set is at most this far behind the acknowledged results, which are read from there on anyway."""

WRITE_SOON_S = 0.05
"""The same for what stands in no result: attempts that failed."""

READ_TIMEOUT_S = 60.0

MOST_RESULTS_READ = 200_000
"""Per partition, when a done-set is very old: records finished before that run again, which is only waste."""

_decode = msgspec.json.Decoder(DoneSet).decode
_decode_result = msgspec.json.Decoder(Result).decode
_encode = msgspec.json.Encoder().encode


class DoneLog:
    """For one event loop. A done-set that cannot be written is reported to `on_failed`."""

    def __init__(
        self, kafka: Kafka, instance: str, producer: AsyncProducer, on_failed: Callable[[BaseException], None]
    ) -> None:
        self._kafka = kafka
        self._instance = instance
        self._producer = producer
        self._on_failed = on_failed
        self._admin = Admin(kafka, f"openrelay-{instance}-done-offsets")
        self._loop = asyncio.get_running_loop()
        self._dirty: set[Lane] = set()
        self._writing: asyncio.TimerHandle | None = None
        self._reservations: dict[Lane, asyncio.Future[None]] = {}
        self.steps: dict[tuple[BatchId, int], list[tuple[int, Step]]] = {}
        """By batch and request partition: steps of workflows that `read` found, with offsets, in order."""

    def read(self, partitions: Iterable[TopicPartition]) -> dict[str, DoneSet]:
        """How far the last owners of these request partitions got, by key. Blocks; raises KafkaFailed."""
        return {
            done_key(done.topic, done.partition, done.batch, done.attempt): done
            for done in self._with_results(self.latest(partitions))
        }

    def latest(self, partitions: Iterable[TopicPartition]) -> list[DoneSet]:
        """The last done-sets of these request partitions as written. Blocks; raises KafkaFailed."""
        wanted = set(partitions)
        places = [(topics.DONE, p) for p in sorted({self._place(t, p) for t, p in wanted})]
        firsts, ends = self._admin.first_offsets(places), self._admin.end_offsets(places)
        latest: dict[str, DoneSet] = {}
        reader = PositionReader(self._kafka, f"openrelay-{self._instance}-done", 1)
        try:
            for topic, p in places:
                place = (topic, p)
                for message in reader.read_to_end(topic, p, firsts[place], ends[place], READ_TIMEOUT_S):
                    assert message.key is not None
                    if message.value is None:
                        latest.pop(message.key, None)
                    else:
                        latest[message.key] = _decode(message.value)
        finally:
            reader.close()
        return [done for done in latest.values() if (done.topic, done.partition) in wanted]

    def _with_results(self, done_sets: list[DoneSet]) -> Iterator[DoneSet]:
        """The done-sets with the results that were acknowledged after they were written."""
        by_partition: dict[int, list[DoneSet]] = {}
        for done in done_sets:
            if bitmap.count(done.finished) < done.started_upto:
                partition = topics.partition_of(done.batch, self._kafka.partitions)
                by_partition.setdefault(partition, []).append(done)
            else:
                yield done
        places = [(topics.RESULTS, p) for p in by_partition]
        firsts, ends = self._admin.first_offsets(places), self._admin.end_offsets(places)
        reader = PositionReader(self._kafka, f"openrelay-{self._instance}-tail", 1)
        try:
            for place in places:
                started = by_partition[place[1]]
                known = min(
                    done.results_upto if done.steps_from is None else min(done.results_upto, done.steps_from)
                    for done in started
                )
                start = max(known, firsts[place], ends[place] - MOST_RESULTS_READ)
                finished = {
                    (d.batch, d.partition): bitmap.padded(d.finished, d.started_upto) for d in started
                }
                for message in reader.read_to_end(*place, start, ends[place], READ_TIMEOUT_S):
                    assert message.value is not None
                    result = _decode_result(message.value)
                    if isinstance(result, Closed):
                        continue
                    partition, position = result.origin
                    lane = result.batch, partition
                    bits = finished.get(lane)
                    if bits is None or position >= len(bits) * 8:
                        continue
                    if isinstance(result, Step):
                        self.steps.setdefault(lane, []).append((message.offset, result))
                    else:
                        bitmap.set_bit(bits, position)
                for done in started:
                    bits = finished[(done.batch, done.partition)]
                    yield msgspec.structs.replace(
                        done, finished=bytes(bits), results_upto=max(done.results_upto, ends[place])
                    )
        finally:
            reader.close()

    async def reserved(self, lane: Lane, position: int) -> None:
        """Return when an acknowledged done-set covers `position`."""
        if lane.reserve(position):
            self.reserve(lane)
        while position >= lane.acked_upto:
            await asyncio.shield(self._reservations[lane])

    def reserve(self, lane: Lane) -> asyncio.Future[None]:
        """Write down that positions below `lane.started_upto` may be running.

        The future ends once that is acknowledged and `lane.acked_upto` says so; never, when it fails.
        """
        upto = lane.started_upto
        covered = self._reservations[lane] = self._loop.create_future()

        def acknowledged(sent: asyncio.Future[Delivery]) -> None:
            if not sent.cancelled() and sent.exception() is None:
                lane.acked_upto = max(lane.acked_upto, upto)
                covered.set_result(None)

        self._send(lane, lane.done_set(clean=False)).add_done_callback(acknowledged)
        return covered

    def changed(self, lane: Lane, within_s: float = WRITE_EVERY_S) -> None:
        """Something more is finished, or was tried: write it down."""
        self._dirty.add(lane)
        if self._writing is not None:
            if self._writing.when() <= self._loop.time() + within_s:
                return
            self._writing.cancel()
        self._writing = self._loop.call_later(within_s, self._write_changed)

    async def leave(self, lanes: Iterable[Lane]) -> None:
        """Nothing runs there any more: say so, and return when it is acknowledged."""
        await asyncio.gather(*(self._send(lane, lane.done_set(clean=True)) for lane in lanes))

    def remove(self, lane: Lane) -> None:
        """The batch has its verdicts."""
        self.forget(lane)
        self._send(lane, None)

    def forget(self, lane: Lane) -> None:
        """The lane is somebody else's now."""
        self._dirty.discard(lane)
        self._reservations.pop(lane, None)

    def _write_changed(self) -> None:
        self._writing = None
        dirty, self._dirty = self._dirty, set()
        for lane in dirty:
            self._send(lane, lane.done_set(clean=False))

    def _send(self, lane: Lane, done: DoneSet | None) -> asyncio.Future[Delivery]:
        sent = self._producer.submit(
            topics.DONE,
            None if done is None else _encode(done),
            key=lane.key(),
            partition=self._place(lane.topic, lane.partition),
        )
        sent.add_done_callback(self._check)
        return sent

    def _check(self, sent: asyncio.Future[Any]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is not None:
            self._on_failed(error)

    def _place(self, topic: str, partition: int) -> int:
        """Done-sets of one request partition lie together."""
        return topics.partition_of(f"{topic}:{partition}", self._kafka.partitions)
