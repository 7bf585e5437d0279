"""Records that a dispatcher has forgotten, or passes over.

A position of a lane is unread, read and waiting (for a slot or for its next try), running, or finished. One
that was read and is none of the others is lost: it will not run before its partition changes hands. And when
nothing of a lane starts although slots are free and nothing forbids it, its records are passed over, or were
running at two crashes and wait to run alone; and a model without servers runs nothing. All this is true for a
moment all the time, so only what stays true for long is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas.ids import BatchId
from streams.core.lanes import Lane

LOST = "read and neither waiting, running nor finished"
PASSED_OVER = "not started although slots are free"
UNSERVED = "its model has no server in the settings"
RUNS_ALONE = "its dispatcher crashed under it more than once: it waits to run alone"


class Sight(NamedTuple):
    """A lane at one look. `waiting` are the positions that were read and wait.

    `could_start`: at this moment slots are free, and nothing forbids to start the lane's records. `served`:
    the model has servers, though they may be busy or out.
    """

    lane: Lane
    waiting: frozenset[int]
    could_start: bool
    served: bool = True


class Stuck(NamedTuple):
    """`position` in the batch's records in this request partition; the first of `records` like it."""

    batch: BatchId
    partition: int
    position: int
    records: int
    seconds: float
    reason: str


class StuckDetector:
    """`look` now and then; times are seconds of any one clock."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, int], float] = {}
        """When a position was first seen lost, and at every look since."""
        self._idle: dict[str, tuple[int, float]] = {}
        """By lane: how many records it had started, and since when it has started none but could."""

    def look(self, sights: Iterable[Sight], now: float, after_s: float) -> list[Stuck]:
        """What has been stuck for longer than `after_s`. All lanes at once: those left out are forgotten."""
        lost: dict[tuple[str, int], float] = {}
        idle: dict[str, tuple[int, float]] = {}
        found = []
        for sight in sights:
            lane, key = sight.lane, sight.lane.key()
            for position in lane.lost(sight.waiting):
                lost[(key, position)] = since = self._lost.get((key, position), now)
                if now - since > after_s:
                    found.append(Stuck(lane.batch, lane.partition, position, 1, now - since, LOST))
            unstarted = [p for p in (lane.next_unread, *sight.waiting) if p is not None]
            if not (unstarted or lane.apart) or (sight.served and not sight.could_start):
                continue
            starts, since = self._idle.get(key, (lane.starts, now))
            idle[key] = (lane.starts, since if starts == lane.starts else now)
            if now - idle[key][1] > after_s:
                seconds = now - idle[key][1]
                if unstarted:
                    records = lane.unread_count + len(sight.waiting)
                    reason = PASSED_OVER if sight.served else UNSERVED
                    found.append(Stuck(lane.batch, lane.partition, min(unstarted), records, seconds, reason))
                if lane.apart:
                    first, records = min(lane.apart), len(lane.apart)
                    reason = RUNS_ALONE if sight.served else UNSERVED
                    found.append(Stuck(lane.batch, lane.partition, first, records, seconds, reason))
        self._lost, self._idle = lost, idle
        return found
