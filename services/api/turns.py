"""Whose turn it is when work waits: organizations in turn, however much one of them has sent."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.ids import OrganizationId


class Turns:
    """At most `most` at a time, of one organization at most `most_each`, so that others find a turn at once.

    Next is who has the fewest under way, of these who was served longest ago. Within an organization it goes
    by arrival. For one event loop.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self._free = most
        self._most_each = most if most_each is None else most_each
        self._running: Counter[OrganizationId] = Counter()
        self._waiting: dict[OrganizationId, deque[asyncio.Future[None]]] = {}
        self._served: dict[OrganizationId, int] = {}
        """When those who wait or run were last served, in turns given."""
        self._given = 0

    @asynccontextmanager
    async def take(self, organization: OrganizationId) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(organization, deque()).append(mine)
        self._give()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self._free += 1
                self._running[organization] -= 1
            elif mine in self._waiting[organization]:
                self._waiting[organization].remove(mine)
            self._give()
            self._forget(organization)

    def _give(self) -> None:
        while self._free and (ready := self._ready()):
            organization = min(ready, key=lambda each: (self._running[each], self._served.get(each, -1)))
            next_one = self._waiting[organization].popleft()
            if next_one.cancelled():
                continue
            self._free -= 1
            self._running[organization] += 1
            self._served[organization] = self._given
            self._given += 1
            next_one.set_result(None)

    def _ready(self) -> list[OrganizationId]:
        return [
            each
            for each, waiting in self._waiting.items()
            if waiting and self._running[each] < self._most_each
        ]

    def _forget(self, organization: OrganizationId) -> None:
        if not self._running[organization] and not self._waiting[organization]:
            del self._running[organization], self._waiting[organization]
            self._served.pop(organization, None)
