"""All endpoints of one model: who takes the next call."""

from __future__ import annotations

from schemas.settings import Pool
from streams.core.extents import share
from streams.pools.endpoint import Endpoint


class Slot:
    """The right to one call at an endpoint."""

    __slots__ = ("_held", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._held = True
        endpoint.in_flight += 1

    def release(self) -> None:
        """Give it back; doing so twice is harmless."""
        if self._held:
            self._held = False
            self.endpoint.in_flight -= 1


class ModelPool:
    """Not thread-safe: for one event loop."""

    def __init__(self, model: str, pools: tuple[Pool, ...]) -> None:
        self.model = model
        self.endpoints: list[Endpoint] = []
        self._share: tuple[frozenset[int], int] = (frozenset(), 1)
        self.configure(pools)

    def configure(self, pools: tuple[Pool, ...]) -> None:
        """Endpoints appear and vanish; a vanished one finishes the calls it has."""
        known = {endpoint.pool: endpoint for endpoint in self.endpoints}
        kept = [known.pop(pool) if pool in known else Endpoint(self.model, pool) for pool in pools]
        for endpoint in known.values():
            endpoint.retired = True
        self.endpoints = kept
        self.own(*self._share)

    def own(self, owned: frozenset[int], partitions: int) -> None:
        """This process owns these of the model's request partitions, and so that share of every limit."""
        self._share = (owned, partitions)
        for endpoint in self.endpoints:
            endpoint.limit.resize(share(endpoint.pool.max_concurrency, set(owned), partitions))

    def free(self, now: float) -> int:
        return sum(endpoint.free(now) for endpoint in self.endpoints)

    def in_service(self, now: float) -> int:
        return sum(now >= endpoint.out_until for endpoint in self.endpoints)

    def acquire(self, now: float, avoid: Endpoint | None = None) -> Slot | None:
        """A slot on the least loaded endpoint, if one is free.

        `avoid` is the endpoint that failed this record last: others are preferred.
        """
        free = [endpoint for endpoint in self.endpoints if endpoint.free(now)]
        if not free:
            return None
        best = min(free, key=lambda endpoint: (endpoint is avoid, endpoint.in_flight / endpoint.limit.value))
        return Slot(best)
