"""The batches as a dashboard shows them: a fold in memory of facts and progress.

Open batches are all kept, ended ones counted and the latest of them kept. Verdicts are counted in buckets of
time by the broker's clock, so that throughput is the same whenever this process was started.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from typing import NamedTuple

import msgspec

from schemas import topics
from schemas.batches import Status
from schemas.facts import BatchFact, Enqueued, Progress
from schemas.ids import BatchId
from streams.core.lifecycle import BatchState, advance, fold
from streams.kafka.messages import Message

TOPICS = [topics.BATCHES, topics.PROGRESS]
BUCKET_MS = 10_000
BUCKETS = 90
LATEST = 100
"""Ended batches kept, of all organizations together."""

_decode_fact = msgspec.json.Decoder(BatchFact).decode
_decode_progress = msgspec.json.Decoder(Progress).decode


class Row(NamedTuple):
    """One batch. `failed` includes the records rejected at create."""

    batch: BatchId
    organization: str
    model: str
    priority: str
    status: Status
    total: int
    completed: int
    failed: int
    cost_nano_usd: int
    created_at_ms: int
    ended_at_ms: int


class Board:
    """`apply` belongs to the follower's thread, the rest to any. Organization None: everybody's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[BatchId, BatchState] = {}
        self._gone: set[BatchId] = set()
        self._latest: list[tuple[int, Row]] = []
        """A heap by the time of their end."""
        self._ended: Counter[tuple[str, Status]] = Counter()
        self._verdicts: Counter[tuple[int, str]] = Counter()

    def apply(self, messages: list[Message]) -> None:
        with self._lock:
            for message in messages:
                if message.value is not None:
                    self._apply(message, message.value)
            newest = max((bucket for bucket, _ in self._verdicts), default=0)
            for key in [key for key in self._verdicts if key[0] <= newest - BUCKETS]:
                del self._verdicts[key]

    def open(self, organization: str | None) -> list[Row]:
        """The newest first."""
        with self._lock:
            rows = [_row(state) for state in self._open.values() if state.exists]
        return _newest([row for row in rows if organization in (None, row.organization)])

    def latest(self, organization: str | None) -> list[Row]:
        """Ended lately, the last first."""
        with self._lock:
            rows = [row for _, row in sorted(self._latest, reverse=True)]
        return [row for row in rows if organization in (None, row.organization)]

    def by_status(self, organization: str | None) -> dict[Status, int]:
        counts: Counter[Status] = Counter(row.status for row in self.open(organization))
        with self._lock:
            for (owner, status), count in self._ended.items():
                if organization in (None, owner):
                    counts[status] += count
        return {status: counts[status] for status in Status}

    def verdicts(self, organization: str | None, now_ms: int) -> list[int]:
        """Records given their verdict, bucket by bucket up to now, the one that runs last."""
        last = now_ms // BUCKET_MS
        counts = dict.fromkeys(range(last - BUCKETS + 1, last + 1), 0)
        with self._lock:
            for (bucket, owner), count in self._verdicts.items():
                if bucket in counts and organization in (None, owner):
                    counts[bucket] += count
        return list(counts.values())

    def _apply(self, message: Message, value: bytes) -> None:
        fact: BatchFact | Progress
        if message.topic == topics.PROGRESS:
            fact = _decode_progress(value)
        else:
            fact = _decode_fact(value)
        batch = fact.batch
        if batch in self._gone:
            return
        before = self._open.get(batch, BatchState())
        if isinstance(fact, Progress):
            state = advance(before, fact)
        else:
            if isinstance(fact, Enqueued):
                # Where the records lie is of no interest here, and long.
                fact = msgspec.structs.replace(fact, extents={})
            state = fold(before, fact, message.timestamp_ms)
        self._count(before, state, message.timestamp_ms)
        if state.withdrawn or (state.ended is not None and state.created is not None):
            self._open.pop(batch, None)
            self._gone.add(batch)
            if state.exists:
                row = _row(state)
                heapq.heappush(self._latest, (row.ended_at_ms, row))
                if len(self._latest) > LATEST:
                    heapq.heappop(self._latest)
                self._ended[(row.organization, row.status)] += 1
        else:
            self._open[batch] = state

    def _count(self, before: BatchState, after: BatchState, at_ms: int) -> None:
        if after.created is None:
            return
        more = _given(after) - (_given(before) if before.created is not None else 0)
        if more > 0:
            self._verdicts[(at_ms // BUCKET_MS, after.created.organization)] += more


def _given(state: BatchState) -> int:
    """Verdicts of accepted records: once a batch is settled its failed ones include the rejected."""
    assert state.created is not None
    rejected = state.created.rejected if state.settled is not None else 0
    return state.completed + state.failed - rejected


def _row(state: BatchState) -> Row:
    created = state.created
    assert created is not None
    return Row(
        batch=created.batch,
        organization=created.organization,
        model=created.model or "",
        priority=created.priority.value,
        status=state.status,
        total=created.total,
        completed=state.completed,
        failed=state.failed + (0 if state.settled is not None else created.rejected),
        cost_nano_usd=state.usage.cost_nano_usd,
        created_at_ms=state.created_at_ms,
        ended_at_ms=state.ended_at_ms,
    )


def _newest(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.created_at_ms, row.batch), reverse=True)
