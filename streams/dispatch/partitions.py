"""The request partitions this process owns, and what is known of the lanes in them.

The group gives partitions away one by one. With fewer slots than partitions some would have none for their
records, so a model's partitions fall into divisions (see `streams.core.extents`), and who is given the first
one of a division owns all of it. Ownership then moves in two ways. The group moves a lead: its last owner has
left when the next begins. Settings change the divisions: every dispatcher reads them for itself, so who is to
have a partition then waits for its last owner's word that nothing runs there any more, for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping

from schemas.ids import BatchId
from schemas.records import DoneSet
from streams.core import bitmap
from streams.core.extents import divisions, led
from streams.core.lanes import Lane, done_key
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job
from streams.kafka.admin import Admin, TopicPartition

HANDED_OVER_POLL_S = 0.25


class Partitions:
    """For one event loop; `positions` may be called from another thread."""

    def __init__(self, admin: Admin, done: DoneLog) -> None:
        self.owned: set[TopicPartition] = set()
        """Whose records are ours to run."""
        self._held: set[TopicPartition] = set()
        """What the group has given us."""
        self._counts: dict[str, int] = {}
        """Partitions of each request topic."""
        self._slots: Mapping[str, int] = {}
        self._reading = asyncio.Lock()
        self._given_up = 0
        """How many times something was given up: what was read of it before says nothing any more."""
        self._admin = admin
        self._done = done
        self._restored: dict[str, DoneSet] = {}
        self._parked: dict[str, Lane] = {}
        """Lanes of partitions that were taken from us, in case they come back: what they know is true."""
        self._high: dict[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int] = {}

    def divide(self, slots: Mapping[str, int]) -> None:
        """What the smallest endpoint of each request topic's model runs at once has become this.

        What is not ours any more stays ours until `give_up`.
        """
        self._slots = slots

    def division(self, topic: str) -> tuple[frozenset[int], int]:
        """The divisions of a topic that are ours, by their leads, and how many there are."""
        count = self._divisions(topic)
        return frozenset(p for t, p in self._held if t == topic and p < count), count

    async def take(self, partitions: list[TopicPartition]) -> None:
        """The group has given us these: read how far the last owner got with what they lead."""
        self._counts |= await asyncio.to_thread(
            self._admin.partitions, {topic for topic, _ in [*self._held, *partitions]}
        )
        self._held |= set(partitions)
        await self._begin(partitions)

    async def follow(self, jobs: Container[BatchId], patience_s: float) -> None:
        """The divisions are others: take what our leads lead now, when its last owner has left these jobs."""
        coming = self._led_by(self._held) - self.owned
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while coming and loop.time() < deadline:
            latest = await asyncio.to_thread(self._done.latest, coming)
            if all(_handed_over(done) for done in latest if done.batch in jobs):
                break
            await asyncio.sleep(HANDED_OVER_POLL_S)
        await self._begin(list(self._held))

    def give_up(self, partitions: Iterable[TopicPartition] = ()) -> set[TopicPartition]:
        """The group has taken these from us, or the divisions are others: what is not ours any more."""
        self._held -= set(partitions)
        gone = self.owned - self._led_by(self._held)
        self.owned -= gone
        self._given_up += 1
        self._restored = {k: d for k, d in self._restored.items() if (d.topic, d.partition) not in gone}
        self._positions = {p: o for p, o in self._positions.items() if p not in gone}
        return gone

    async def _begin(self, leads: list[TopicPartition]) -> None:
        async with self._reading:
            while coming := self._led_by(self._held & set(leads)) - self.owned:
                before = self._given_up
                restored = await asyncio.to_thread(self._done.read, coming)
                if self._given_up == before:
                    self._restored |= restored
                    self.owned |= coming & self._led_by(self._held)

    def _led_by(self, leads: Iterable[TopicPartition]) -> set[TopicPartition]:
        return {
            (topic, p)
            for topic, lead in leads
            for p in led(lead, self._counts.get(topic, 0), self._divisions(topic))
        }

    def _divisions(self, topic: str) -> int:
        count = self._counts.get(topic, 0)
        return divisions(count, self._slots.get(topic, count))

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


def _handed_over(done: DoneSet) -> bool:
    """Whether its owner has left it, or has finished everything it started."""
    return done.clean or bitmap.count(done.finished) >= done.started_upto
