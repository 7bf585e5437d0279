"""What a dispatcher shows of itself: gauges, counters of calls, and records that are stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import structlog
from prometheus_client import Counter as Count
from prometheus_client import Histogram

from schemas.ids import BatchId
from streams import metrics
from streams.core.judge import Broken, Outcome, Reply, TimedOut, Unreachable
from streams.core.stuck import Sight, Stuck, StuckDetector
from streams.dispatch.backlog import Backlog
from streams.dispatch.jobs import Job, Work
from streams.pools.pool import ModelPool

LOOKS_PER_BOUND = 20
MOST_NAMED = 20
"""Stuck records named in the log at one look."""

log = structlog.get_logger("openrelay.dispatch")

Retries = Sequence[tuple[float, int, Work, Job]]


class Watch:
    """For one event loop; `may_start` says whether records of a job could be started at this moment."""

    def __init__(
        self,
        jobs: Mapping[BatchId, Job],
        pools: Mapping[str, ModelPool],
        retries: Retries,
        backlog: Backlog,
        may_start: Callable[[Job], bool],
    ) -> None:
        self._jobs = jobs
        self._backlog = backlog
        self._pools = pools
        self._retries = retries
        self._may_start = may_start
        self._detector = StuckDetector()
        self._named: set[tuple[BatchId, int, int]] = set()
        self._endpoints: set[tuple[str, str]] = set()
        self._models: set[str] = set()
        """Those of the settings and of batches, now or before."""
        self._next_look = 0.0

    def look(self, now: float, after_s: float, *, unacked_bytes: int) -> None:
        """Bring the gauges up to date and, now and then, look for records that are stuck."""
        metrics.READY_BYTES.set(self._backlog.bytes_waiting)
        metrics.UNACKED_BYTES.set(unacked_bytes)
        self._show_endpoints(now)
        self._show_records()
        if now >= self._next_look:
            self._next_look = now + after_s / LOOKS_PER_BOUND
            self._show_stuck(self._detector.look(self._sights(), now, after_s))

    def _show_endpoints(self, now: float) -> None:
        shown = set()
        for model, pool in self._pools.items():
            for endpoint in pool.endpoints:
                labels = (model, endpoint.pool.address)
                shown.add(labels)
                metrics.IN_FLIGHT.labels(*labels).set(endpoint.in_flight)
                metrics.SLOTS.labels(*labels).set(endpoint.limit.value)
                metrics.MAX_SLOTS.labels(*labels).set(endpoint.limit.maximum)
                metrics.ENDPOINT_OUT.labels(*labels).set(now < endpoint.out_until)
        for labels in self._endpoints - shown:
            for gauge in (metrics.IN_FLIGHT, metrics.SLOTS, metrics.MAX_SLOTS, metrics.ENDPOINT_OUT):
                gauge.remove(*labels)
        self._endpoints = shown

    def _show_records(self) -> None:
        ready, batches, retrying = Counter[str](), Counter[str](), Counter[str]()
        for job in self._jobs.values():
            if job.lanes:
                ready[job.model] += len(job.ready)
                batches[job.model] += 1
        for *_, job in self._retries:
            retrying[job.model] += 1
        self._models.update(self._pools, batches, retrying)
        for model in self._models:
            metrics.READY.labels(model).set(ready[model])
            metrics.OPEN_BATCHES.labels(model).set(batches[model])
            metrics.RETRYING.labels(model).set(retrying[model])

    def _sights(self) -> Iterator[Sight]:
        """Every lane whose records are to run."""
        waiting: dict[tuple[BatchId, int], set[int]] = {}
        for work in [
            *(work for job in self._jobs.values() for work in job.ready),
            *(work for _, _, work, _ in self._retries),
        ]:
            waiting.setdefault((work.lane.batch, work.lane.partition), set()).add(work.position)
        for lane, first, last in self._backlog.reading:
            waiting.setdefault((lane.batch, lane.partition), set()).update(range(first, last + 1))
        for job in self._jobs.values():
            if job.closing is not None:
                continue
            could_start, pool = self._may_start(job), self._pools.get(job.model)
            served = pool is not None and bool(pool.endpoints)
            for partition, lane in job.lanes.items():
                yield Sight(lane, frozenset(waiting.get((job.batch, partition), ())), could_start, served)

    def _show_stuck(self, stuck: list[Stuck]) -> None:
        counts = Counter[str]()
        for each in stuck:
            counts[self._jobs[each.batch].model] += each.records
        for model in self._models:
            metrics.STUCK.labels(model).set(counts[model])
        found = {(each.batch, each.partition, each.position): each for each in stuck}
        for key in sorted(found.keys() - self._named)[:MOST_NAMED]:
            each = found[key]
            log.warning(
                "record stuck",
                batch=each.batch,
                partition=each.partition,
                position=each.position,
                records=each.records,
                seconds=round(each.seconds, 1),
                reason=each.reason,
            )
        self._named = set(found)


def count_call(model: str, outcome: Outcome, seconds: float) -> None:
    """A call has ended."""
    _calls(model, _kind(outcome)).inc()
    _call_seconds(model).observe(seconds)


@cache
def _calls(model: str, outcome: str) -> Count:
    """Looking a counter up by its labels takes longer than counting."""
    return metrics.CALLS.labels(model, outcome)


@cache
def _call_seconds(model: str) -> Histogram:
    return metrics.CALL_SECONDS.labels(model)


def _kind(outcome: Outcome) -> str:
    match outcome:
        case Reply(status=429):
            return "429"
        case Reply(status=status):
            return f"{status // 100}xx"
        case TimedOut():
            return "timed_out"
        case Unreachable():
            return "unreachable"
        case Broken():
            return "broken"
