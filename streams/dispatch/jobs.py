"""One open batch as a dispatcher sees it."""

from __future__ import annotations

import asyncio
from collections import deque

from msgspec import UNSET

from schemas.ids import BatchId
from schemas.records import Request
from streams.core.lanes import Lane
from streams.core.lifecycle import BatchState
from streams.core.workflow import Workflow
from streams.pools.endpoint import Endpoint
from streams.pools.pool import Slot


class Tries:
    """What has been tried of one model call."""

    __slots__ = ("attempts", "avoid")

    def __init__(self) -> None:
        self.attempts = 0
        self.avoid: Endpoint | None = None
        """The endpoint that failed it last."""


class Work(Tries):
    """One record on its way through this dispatcher; the tries are those of its only call, or its first."""

    __slots__ = ("flow", "lane", "not_before", "position", "request", "size")

    def __init__(self, lane: Lane, position: int, request: Request, size: int) -> None:
        super().__init__()
        self.lane = lane
        self.position = position
        self.request = request
        self.size = size
        self.not_before = 0.0
        self.flow: Workflow | None = None
        """Set once the record turns out to be a workflow."""

    @property
    def loops(self) -> bool:
        """Whether it has tools or a workflow: more than one call, and waits between them."""
        return self.request.sealed is not UNSET

    @property
    def origin(self) -> tuple[int, int]:
        """Request partition and position in it."""
        return self.lane.partition, self.position


class Turn:
    """A running record that wants a slot for its next call."""

    __slots__ = ("avoid", "size", "slot")

    def __init__(self, avoid: Endpoint | None, size: int) -> None:
        self.avoid = avoid
        self.size = size
        self.slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()


class Job:
    """A batch with work in our partitions, or soon to have some."""

    def __init__(self, batch: BatchId, state: BatchState, model: str) -> None:
        self.batch = batch
        self.state = state
        self.model = model
        self.lanes: dict[int, Lane] = {}
        """By request partition; only partitions we own."""
        self.ready: deque[Work] = deque()
        """Read and waiting for a slot."""
        self.turns: deque[Turn] = deque()
        """Running and waiting for a slot: these go first."""
        self.reads = 0
        """Reads under way."""
        self.running: dict[asyncio.Task[None], Work] = {}
        """Records being called, or whose result is not yet on its way."""
        self.closing: str | None = None
        """Why no more of its records start: `cancelled` or `expired`."""
        self.stopped = asyncio.Event()
        """Set with `closing`: nothing is tried again."""
        self.window_over = False
        """Calls were stopped: a record whose call was ends as expired."""
        self.closed: set[int] = set()
        """Partitions for which `closed` was sent."""

    def unread(self) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.anything_unread]
