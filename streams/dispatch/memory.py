"""The memory of records under way: what they hold together is bounded, and none waits for ever.

A record that would grow waits until others have given room, unless it is the eldest of its model, the one
that began first: that one always goes on, so there is always one that will end and leave its room to the
others. One of each model, since those of a model whose servers are out end no sooner than these are back.
What else an eldest waits for is not held by those that wait here, or it is let past them (`Hold.eldest`).
One organization's records have a part of the whole, so that those of others find some.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_BYTES = 96 * 1024 * 1024
"""Of all records together; the eldest of each model may go beyond."""

MAX_ORGANIZATION_BYTES = MAX_BYTES // 2

MAX_CONVERSATION_BYTES = 32 * 1024 * 1024
"""A request and all that its turns add to it: twice the largest record, as much as one answer of a model may
have, and more than fits any model's context."""


class TooLarge(Exception):
    """The record would come to more than its limit."""


class Memory:
    """For one event loop."""

    def __init__(self, most: int = MAX_BYTES, organization_most: int = MAX_ORGANIZATION_BYTES) -> None:
        self._most = most
        self._organization_most = organization_most
        self._holds: dict[str, dict[Hold, None]] = {}
        """By model, in the order they began."""
        self._records: dict[str, int] = {}
        """By organization, how many there are."""
        self._organizations: dict[str, int] = {}
        self._waiting: dict[asyncio.Future[None], tuple[Hold, int]] = {}
        self.used = 0

    def full(self, organization: str) -> bool:
        part = self._organizations.get(organization, 0)
        return self.used >= self._most or part >= self._organization_most

    def hold(self, organization: str, model: str, size: int) -> Hold:
        """A record that begins, with what it holds from the start. `end` it."""
        hold = Hold(self, organization, model)
        self._holds.setdefault(model, {})[hold] = None
        self._records[organization] = self._records.get(organization, 0) + 1
        self._name_eldest(model)
        hold.size = size
        self.add(hold, size)
        return hold

    # ---- for holds ----

    def fits(self, hold: Hold, size: int) -> bool:
        if hold.eldest.is_set():
            return True
        part = self._organizations.get(hold.organization, 0) + size
        return self.used + size <= self._most and part <= self._organization_most

    def add(self, hold: Hold, size: int) -> None:
        self.used += size
        self._organizations[hold.organization] = self._organizations.get(hold.organization, 0) + size
        if size < 0:
            self._serve()

    async def wait(self, hold: Hold, size: int) -> None:
        """Add as soon as there is room."""
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[room] = hold, size
        try:
            await room
        except asyncio.CancelledError:
            if room.done() and not room.cancelled():
                self.add(hold, -size)
            raise
        finally:
            self._waiting.pop(room, None)

    def end(self, hold: Hold) -> None:
        del self._holds[hold.model][hold]
        self._name_eldest(hold.model)
        self.used -= hold.size
        self._organizations[hold.organization] -= hold.size
        self._records[hold.organization] -= 1
        if not self._records[hold.organization]:
            del self._records[hold.organization], self._organizations[hold.organization]
        self._serve()

    def _name_eldest(self, model: str) -> None:
        eldest = next(iter(self._holds[model]), None)
        if eldest is None:
            del self._holds[model]
        else:
            eldest.eldest.set()

    def _serve(self) -> None:
        """Let those go on that there is room for, in the order they came."""
        for room, (hold, size) in list(self._waiting.items()):
            if not room.done() and self.fits(hold, size):
                del self._waiting[room]
                self.add(hold, size)
                room.set_result(None)


class Hold:
    """What one record holds."""

    def __init__(self, memory: Memory, organization: str, model: str) -> None:
        self._memory = memory
        self.organization = organization
        self.model = model
        self.eldest = asyncio.Event()
        """Set once all records of its model that began earlier have ended."""
        self.size = 0
        self.limit: int | None = None
        """What it may come to at most, copies that are borrowed for not counted."""

    def take(self, size: int) -> bool:
        """Grow, if there is room now. Raises TooLarge."""
        if self.limit is not None and self.size + size > self.limit:
            raise TooLarge
        if not self._memory.fits(self, size):
            return False
        self.resize(self.size + size)
        return True

    async def wait(self, size: int) -> None:
        """Grow, as soon as there is room. Raises TooLarge."""
        if not self.take(size):
            await self._memory.wait(self, size)
            self.size += size

    def give(self, size: int) -> None:
        self.resize(self.size - size)

    def resize(self, size: int) -> None:
        """Hold so much, room or not: it is there already."""
        grown, self.size = size - self.size, size
        self._memory.add(self, grown)

    @asynccontextmanager
    async def borrowed(self, size: int) -> AsyncIterator[None]:
        """Room for a copy, waited for and given back."""
        if self._memory.fits(self, size):
            self._memory.add(self, size)
        else:
            await self._memory.wait(self, size)
        try:
            yield
        finally:
            self._memory.add(self, -size)

    def end(self) -> None:
        """Nothing is held or waited for any more."""
        self._memory.end(self)
