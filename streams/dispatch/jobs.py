"""One open batch as a dispatcher sees it."""

from __future__ import annotations

import asyncio
from collections import deque

from schemas.ids import BatchId
from schemas.records import Request
from streams.core.lanes import Lane
from streams.core.lifecycle import BatchState
from streams.pools.endpoint import Endpoint


class Work:
    """One record on its way through this dispatcher."""

    __slots__ = ("attempts", "avoid", "lane", "not_before", "position", "request", "size")

    def __init__(self, lane: Lane, position: int, request: Request, size: int) -> None:
        self.lane = lane
        self.position = position
        self.request = request
        self.size = size
        self.attempts = 0
        self.not_before = 0.0
        self.avoid: Endpoint | None = None

    @property
    def origin(self) -> tuple[int, int]:
        """Request partition and position in it."""
        return self.lane.partition, self.position


class Job:
    """A batch with work in our partitions, or soon to have some."""

    def __init__(self, batch: BatchId, state: BatchState) -> None:
        self.batch = batch
        self.state = state
        self.model = ""
        self.lanes: dict[int, Lane] = {}
        """By request partition; only partitions we own."""
        self.ready: deque[Work] = deque()
        """Read and waiting for a slot."""
        self.reads = 0
        """Reads under way."""
        self.running: dict[asyncio.Task[None], Work] = {}
        """Records being called, or whose result is not yet on its way."""
        self.closing: str | None = None
        """Why no more of its records start: `cancelled` or `expired`."""
        self.window_over = False
        """Calls were stopped: a record whose call was ends as expired."""
        self.closed: set[int] = set()
        """Partitions for which `closed` was sent."""

    @property
    def result_partition_key(self) -> str:
        return self.batch

    def unread(self) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.anything_unread]
