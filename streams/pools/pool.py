"""All endpoints of one model: who takes the next call."""

from __future__ import annotations

from schemas.settings import Pool
from streams.core.extents import share
from streams.pools.endpoint import Endpoint, place


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
        self._leaving: list[Endpoint] = []
        """Endpoints that have vanished from the settings while calls ran there."""
        self._share: tuple[frozenset[int], int] = (frozenset(), 1)
        self.configure(pools)

    def configure(self, pools: tuple[Pool, ...]) -> None:
        """Endpoints appear and vanish; a vanished one finishes the calls it has.

        One that stays, or comes back before they are finished, counts them against its new limit.
        """
        known: dict[tuple[str, str | None], list[Endpoint]] = {}
        for endpoint in [*self.endpoints, *self._leaving]:
            known.setdefault(endpoint.place, []).append(endpoint)
        self.endpoints = []
        for pool in pools:
            same = known.get(place(self.model, pool))
            endpoint = same.pop(0) if same else Endpoint(self.model, pool)
            endpoint.configure(pool)
            self.endpoints.append(endpoint)
        gone = [endpoint for rest in known.values() for endpoint in rest]
        for endpoint in gone:
            endpoint.retired = True
        self._leaving = [endpoint for endpoint in gone if endpoint.in_flight]
        self.own(*self._share)

    @property
    def busy(self) -> list[Endpoint]:
        """Endpoints where calls run, also those the settings do not name any more."""
        return [endpoint for endpoint in [*self.endpoints, *self._leaving] if endpoint.in_flight]

    @property
    def least_slots(self) -> int:
        """What the smallest endpoint runs at once."""
        return min((endpoint.pool.max_concurrency for endpoint in self.endpoints), default=0)

    def own(self, leads: frozenset[int], divisions: int) -> None:
        """This process has these of the divisions of the model's partitions, and so that share of limits."""
        self._share = (leads, divisions)
        for endpoint in self.endpoints:
            endpoint.limit.resize(share(endpoint.pool.max_concurrency, leads, divisions))

    @property
    def slots(self) -> int:
        """Calls this process may have running at once."""
        return sum(endpoint.limit.value for endpoint in self.endpoints)

    def free(self, now: float) -> int:
        return sum(endpoint.free(now) for endpoint in self.endpoints)

    def has_other(self, endpoint: Endpoint, now: float) -> bool:
        """Whether another endpoint is in service and may take calls."""
        return any(
            now >= other.out_until and other.limit.value for other in self.endpoints if other is not endpoint
        )

    def acquire(self, now: float, avoid: Endpoint | None = None) -> Slot | None:
        """A slot on the least loaded endpoint, if one is free.

        `avoid` is the endpoint that failed this record last: others are preferred.
        """
        free = [endpoint for endpoint in self.endpoints if endpoint.free(now)]
        if not free:
            return None
        best = min(free, key=lambda endpoint: (endpoint is avoid, endpoint.in_flight / endpoint.limit.value))
        return Slot(best)
