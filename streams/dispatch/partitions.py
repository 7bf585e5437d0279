"""The request partitions this process owns, and what is known of the lanes in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from schemas.records import DoneSet
from streams.core.lanes import Lane, done_key
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job
from streams.kafka.admin import Admin, TopicPartition


class Partitions:
    """For one event loop; `positions` may be called from another thread."""

    def __init__(self, admin: Admin, done: DoneLog) -> None:
        self.owned: set[TopicPartition] = set()
        self.counts: dict[str, int] = {}
        """Partitions of each request topic."""
        self._admin = admin
        self._done = done
        self._restored: dict[str, DoneSet] = {}
        self._parked: dict[str, Lane] = {}
        """Lanes of partitions that were taken from us, in case they come back: what they know is true."""
        self._high: dict[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int] = {}

    async def take(self, partitions: list[TopicPartition]) -> None:
        """They are ours: read how far their last owner got."""
        self.counts |= await asyncio.to_thread(self._admin.partitions, {topic for topic, _ in partitions})
        self._restored |= await asyncio.to_thread(self._done.read, partitions)
        self.owned |= set(partitions)

    def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        gone = set(partitions)
        self.owned -= gone
        self._restored = {k: d for k, d in self._restored.items() if (d.topic, d.partition) not in gone}
        self._positions = {p: o for p, o in self._positions.items() if p not in gone}

    def park(self, lanes: Iterable[Lane]) -> None:
        self._parked |= {lane.key(): lane for lane in lanes}

    def forget(self, job: Job) -> list[Lane]:
        """The batch has its verdicts: all lanes of it that are known."""
        parked = [lane for lane in self._parked.values() if lane.batch == job.batch]
        for lane in parked:
            del self._parked[lane.key()]
        return [*job.lanes.values(), *parked]

    def open_lane(self, job: Job, partition: int) -> Lane:
        """The lane of a job in one of our partitions, where its last owner, or we, left it."""
        enqueued = job.state.enqueued
        assert enqueued is not None
        key = done_key(enqueued.topic, partition, job.batch, enqueued.attempt)
        restored, lane = self._restored.pop(key, None), self._parked.pop(key, None)
        if lane is None:
            runs = enqueued.extents[partition]
            lane = Lane(job.batch, enqueued.attempt, enqueued.topic, partition, runs, restored)
        elif restored is not None:
            lane.absorb(restored)
        for offset, step in self._done.steps.pop((job.batch, partition), []):
            lane.restore_step(step, offset)
        job.lanes[partition] = lane
        return lane

    def note_end(self, where: TopicPartition, offset: int) -> None:
        """Records are known to lie below this offset."""
        self._high[where] = max(self._high.get(where, 0), offset)

    def note_positions(self, jobs: Iterable[Job]) -> None:
        """Work out what the group commits: the lowest unfinished offset of each partition."""
        lowest = {where: self._high[where] for where in self.owned if where in self._high}
        for job in jobs:
            for lane in job.lanes.values():
                offset, where = lane.lowest_unfinished_offset, (lane.topic, lane.partition)
                if offset is not None and where in lowest:
                    lowest[where] = min(lowest[where], offset)
        self._positions = lowest

    def positions(self) -> dict[TopicPartition, int]:
        """For tools that show lag; nothing of ours reads it back."""
        return self._positions
