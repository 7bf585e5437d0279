"""Which batch runs next: fair between organizations, then between the batches of one.

Expedited batches go before standard ones, which keep one slot in ten. Within a priority the slot goes to the
organization that has had the least service for its weight, and there to the batch that has had the least;
service is counted in estimated tokens. Whoever comes late or was idle starts level with the others: credit is
not saved up. Batches whose deadline is near take every second slot, the nearest first.

All dispatchers see the same batches and each owns a share of every batch's records, so each being fair makes
the cluster fair.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from schemas.facts import Priority
from schemas.ids import BatchId, OrganizationId

STANDARD_FLOOR = 10
"""Of this many slots in a row, standard batches get one while expedited ones wait."""

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items that share service in proportion to their weights; every call costs O(log n).

    An item's virtual time is its service divided by its weight; the lowest of those ready is next. Heap
    entries are invalidated by a stamp rather than removed.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._time: dict[Item, float] = {}
        self._weight: dict[Item, float] = {}
        self._stamp: dict[Item, int] = {}
        self._ready: set[Item] = set()
        self._heap: list[tuple[float, int, Item]] = []
        self._count = 0

    def __contains__(self, item: Item) -> bool:
        return item in self._time

    def __bool__(self) -> bool:
        return bool(self._time)

    @property
    def any_ready(self) -> bool:
        return bool(self._ready)

    def add(self, item: Item, weight: float) -> None:
        self._time[item] = self._clock
        self._weight[item] = weight
        self._stamp[item] = -1

    def remove(self, item: Item) -> None:
        self._ready.discard(item)
        for table in (self._time, self._weight, self._stamp):
            table.pop(item, None)

    def set_ready(self, item: Item, ready: bool) -> None:
        if ready and item not in self._ready:
            self._ready.add(item)
            self._time[item] = max(self._time[item], self._clock)
            self._push(item)
        elif not ready:
            self._ready.discard(item)

    def peek(self) -> Item | None:
        """The item whose turn it is."""
        while self._heap:
            time, stamp, item = self._heap[0]
            if item in self._ready and self._stamp.get(item) == stamp:
                self._clock = max(self._clock, time)
                return item
            heapq.heappop(self._heap)
        return None

    def charge(self, item: Item, service: float) -> None:
        """Account for service an item has been given."""
        self._time[item] += service / self._weight[item]
        if item in self._ready:
            self._push(item)

    def _push(self, item: Item) -> None:
        self._count += 1
        self._stamp[item] = self._count
        heapq.heappush(self._heap, (self._time[item], self._count, item))


class _Entry:
    __slots__ = ("batch", "expires_at_ms", "organization", "priority", "urgent_at_ms")

    def __init__(
        self,
        batch: BatchId,
        organization: OrganizationId,
        priority: Priority,
        expires_at_ms: int,
        urgent_at_ms: int,
    ) -> None:
        self.batch = batch
        self.organization = organization
        self.priority = priority
        self.expires_at_ms = expires_at_ms
        self.urgent_at_ms = urgent_at_ms


class Schedule:
    """The order of work of one model."""

    def __init__(self) -> None:
        self._entries: dict[BatchId, _Entry] = {}
        self._ready: set[BatchId] = set()
        self._organizations: dict[Priority, FairQueue[OrganizationId]] = {p: FairQueue() for p in Priority}
        self._batches: dict[tuple[Priority, OrganizationId], FairQueue[BatchId]] = {}
        self._waiting: list[tuple[int, BatchId]] = []
        self._urgent: list[tuple[int, BatchId]] = []
        self._since_standard = 0
        self._urgent_last = False

    def __contains__(self, batch: BatchId) -> bool:
        return batch in self._entries

    @property
    def any_ready(self) -> bool:
        return bool(self._ready)

    def add(
        self,
        batch: BatchId,
        organization: OrganizationId,
        priority: Priority,
        *,
        weight: float,
        expires_at_ms: int,
        urgent_at_ms: int,
    ) -> None:
        """A batch appears, not ready. From `urgent_at_ms` on its deadline counts as near."""
        self._entries[batch] = _Entry(batch, organization, priority, expires_at_ms, urgent_at_ms)
        organizations = self._organizations[priority]
        if organization not in organizations:
            organizations.add(organization, weight)
        self._batches.setdefault((priority, organization), FairQueue()).add(batch, 1.0)
        heapq.heappush(self._waiting, (urgent_at_ms, batch))

    def remove(self, batch: BatchId) -> None:
        entry = self._entries.pop(batch, None)
        if entry is None:
            return
        self._ready.discard(batch)
        key = (entry.priority, entry.organization)
        batches = self._batches[key]
        batches.remove(batch)
        if not batches:
            del self._batches[key]
            self._organizations[entry.priority].remove(entry.organization)
        else:
            self._organizations[entry.priority].set_ready(entry.organization, batches.any_ready)

    def set_ready(self, batch: BatchId, ready: bool) -> None:
        """Whether the batch has a record that could start."""
        entry = self._entries.get(batch)
        if entry is None or (batch in self._ready) == ready:
            return
        (self._ready.add if ready else self._ready.discard)(batch)
        batches = self._batches[(entry.priority, entry.organization)]
        batches.set_ready(batch, ready)
        self._organizations[entry.priority].set_ready(entry.organization, batches.any_ready)

    def pick(self, now_ms: int) -> BatchId | None:
        """The batch whose turn it is; None when none is ready. Changes nothing until `charge`."""
        if not self._ready:
            return None
        if not self._urgent_last:
            urgent = self._nearest_deadline(now_ms)
            if urgent is not None:
                return urgent
        expedited = self._organizations[Priority.EXPEDITED]
        standard = self._organizations[Priority.STANDARD]
        floor_due = self._since_standard >= STANDARD_FLOOR - 1
        if standard.any_ready and (floor_due or not expedited.any_ready):
            return self._next(Priority.STANDARD)
        return self._next(Priority.EXPEDITED)

    def charge(self, batch: BatchId, tokens: float, now_ms: int) -> None:
        """One record of the batch was started, of about this many tokens."""
        entry = self._entries[batch]
        self._urgent_last = now_ms >= entry.urgent_at_ms and not self._urgent_last
        if entry.priority is Priority.STANDARD:
            self._since_standard = 0
        else:
            self._since_standard += 1
        self._batches[(entry.priority, entry.organization)].charge(batch, tokens)
        self._organizations[entry.priority].charge(entry.organization, tokens)

    def _next(self, priority: Priority) -> BatchId | None:
        organization = self._organizations[priority].peek()
        return None if organization is None else self._batches[(priority, organization)].peek()

    def _nearest_deadline(self, now_ms: int) -> BatchId | None:
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, batch = heapq.heappop(self._waiting)
            if batch in self._entries:
                heapq.heappush(self._urgent, (self._entries[batch].expires_at_ms, batch))
        while self._urgent and self._urgent[0][1] not in self._entries:
            heapq.heappop(self._urgent)
        ready = [entry for entry in self._urgent if entry[1] in self._ready]
        return min(ready)[1] if ready else None
