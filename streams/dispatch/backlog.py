"""Records read ahead of their calls: bounded in records and bytes, read for whichever batch is due."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor

import msgspec

from schemas.records import Request
from schemas.settings import Kafka
from streams.core.lanes import Lane
from streams.dispatch.jobs import Job, Work
from streams.kafka.messages import Message
from streams.kafka.reader import PositionReader

READERS = 4
CHUNK = 256
"""Records of one read; a read of 20 takes as long as one of 300."""

LOW_WATER = CHUNK // 2
"""A batch with fewer records waiting than the model has slots, and so many more, is read ahead for: all slots
may become free at once."""

MAX_BYTES = 64 * 1024 * 1024
"""Read-ahead of all batches together; beyond it only a batch with nothing waiting is read for."""

READ_TIMEOUT_S = 30.0

_decode = msgspec.json.Decoder(Request).decode


class Backlog:
    """For one event loop; reads run in threads."""

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self.bytes_waiting = 0
        self.reading: set[tuple[Lane, int, int]] = set()
        """Positions of lanes, first and last, that are being read."""
        self._reader = PositionReader(kafka, client_id, READERS)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="backlog")
        self._turn = 0

    def wants_more(self, job: Job, slots: int) -> bool:
        """Whether to read ahead for a job now; its model has so many slots."""
        if job.reads or job.closing is not None or not job.unread():
            return False
        if not job.ready:
            return True
        return len(job.ready) < LOW_WATER + slots and self.bytes_waiting < MAX_BYTES

    async def read(self, job: Job) -> None:
        """Read the next chunk of a job, a partition at a time. The caller counts `job.reads`.

        Raises KafkaFailed; the positions will be read again.
        """
        lanes = job.unread()
        if not lanes:
            return
        self._turn += 1
        lane = lanes[self._turn % len(lanes)]
        span = lane.next_read(CHUNK)
        if span is None:
            return
        reading = (lane, *span)
        self.reading.add(reading)
        try:
            messages = await self._read(lane, *span)
        except BaseException:
            lane.unread(*span)
            raise
        finally:
            self.reading.discard(reading)
        if job.lanes.get(lane.partition) is not lane:
            lane.unread(*span)
            return
        last = span[0] - 1
        for message in messages:
            position = lane.positions.position(message.offset)
            assert position is not None, "reads stay within the runs"
            last = position
            if not lane.is_finished(position):
                self.add(job, self._work(lane, position, message))
        if last < span[1]:
            lane.unread(last + 1, span[1])

    async def read_one(self, lane: Lane, position: int) -> Work:
        """The record at one position."""
        messages = await self._read(lane, position, position)
        return self._work(lane, position, messages[0])

    def add(self, job: Job, work: Work) -> None:
        job.ready.append(work)
        self.bytes_waiting += work.size

    def pop(self, job: Job) -> Work:
        work = job.ready.popleft()
        self.bytes_waiting -= work.size
        return work

    def drop(self, job: Job, lane: Lane | None = None) -> None:
        """Put the waiting records of a job, or of one of its lanes, back among the unread."""
        for _ in range(len(job.ready)):
            work = self.pop(job)
            if lane is None or work.lane is lane:
                work.lane.unread(work.position, work.position)
            else:
                self.add(job, work)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._reader.close()

    async def _read(self, lane: Lane, first: int, last: int) -> list[Message]:
        read = functools.partial(
            self._reader.read,
            lane.topic,
            lane.partition,
            lane.positions.offset(first),
            lane.positions.offset(last),
            most=last - first + 1,
            timeout_s=READ_TIMEOUT_S,
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def _work(self, lane: Lane, position: int, message: Message) -> Work:
        assert message.value is not None
        work = Work(lane, position, _decode(message.value), len(message.value))
        work.attempts = lane.attempts.get(position, 0)
        return work
