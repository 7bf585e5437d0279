"""What the dashboard says, before it is HTML: numbers of all roles, added up where that makes sense."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from schemas.batches import Status
from services.control.board import BUCKET_MS, Board, Row
from services.control.lag import Lag
from services.control.shown import Shown

ROWS = 25
"""Open batches, and ended ones, that are shown."""

OUTCOMES_OF_TROUBLE = ("4xx", "429", "5xx", "3xx", "timed_out", "broken", "unreachable")
MINUTE_BUCKETS = 60_000 // BUCKET_MS


class Role(NamedTuple):
    """`memory` in bytes; None when it does not answer."""

    name: str
    up: bool
    memory: int | None


class Endpoint(NamedTuple):
    """Of all dispatchers together; `out` when no dispatcher sends it calls."""

    model: str
    address: str
    in_flight: int
    slots: int
    max_slots: int
    out: bool


class Overview(NamedTuple):
    now_ms: int
    organization: str | None
    """Whose batches are shown; None: everybody's."""
    roles: list[Role]
    by_status: dict[Status, int]
    open: list[Row]
    latest: list[Row]
    verdicts: list[int]
    """By bucket, the one that runs last."""
    endpoints: list[Endpoint]
    trouble: dict[str, int]
    """Calls that did not bring an answer, by how they ended, since the dispatchers started."""
    stuck: int
    lags: list[Lag] | None
    """None: the broker does not answer."""

    @property
    def per_second(self) -> float:
        """Records given their verdict, over the last whole minute of buckets."""
        whole = self.verdicts[-1 - MINUTE_BUCKETS : -1]
        return sum(whole) / 60

    @property
    def waiting(self) -> int:
        """Records of open batches without a verdict."""
        return sum(row.total - row.completed - row.failed for row in self.open)


def overview(
    board: Board, shown: list[Shown], lags: list[Lag] | None, organization: str | None, now_ms: int
) -> Overview:
    return Overview(
        now_ms=now_ms,
        organization=organization,
        roles=[_role(each) for each in shown],
        by_status=board.by_status(organization),
        open=board.open(organization),
        latest=board.latest(organization)[:ROWS],
        verdicts=board.verdicts(organization, now_ms),
        endpoints=_endpoints(shown),
        trouble=_trouble(shown),
        stuck=round(sum(value for _, value in _samples(shown, "openrelay_dispatch_stuck_records"))),
        lags=lags,
    )


def _role(each: Shown) -> Role:
    memory = [value for _, value in _samples([each], "process_resident_memory_bytes")]
    return Role(each.role, each.families is not None, round(memory[0]) if memory else None)


def _endpoints(shown: list[Shown]) -> list[Endpoint]:
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name in ("in_flight", "slots", "max_slots", "endpoint_out"):
        for labels, value in _samples(shown, f"openrelay_dispatch_{name}"):
            sums[(labels["model"], labels["endpoint"])][name] += value
            sums[(labels["model"], labels["endpoint"])][f"{name}_count"] += 1
    return [
        Endpoint(
            model,
            address,
            round(found["in_flight"]),
            round(found["slots"]),
            round(found["max_slots"]),
            0 < found["endpoint_out_count"] == found["endpoint_out"],
        )
        for (model, address), found in sorted(sums.items())
    ]


def _trouble(shown: list[Shown]) -> dict[str, int]:
    counts = dict.fromkeys(OUTCOMES_OF_TROUBLE, 0)
    for labels, value in _samples(shown, "openrelay_dispatch_calls_total"):
        if labels["outcome"] in counts:
            counts[labels["outcome"]] += round(value)
    return counts


def _samples(shown: list[Shown], name: str) -> Iterator[tuple[dict[str, str], float]]:
    for each in shown:
        for family in each.families or ():
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value
