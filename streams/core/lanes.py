"""How far a dispatcher got with one batch in one request partition.

Positions go through `unread -> reserved -> running -> finished`. Before any position is started, a done-set
that covers it with `started_upto` is in the log; after its result is acknowledged it is set in `finished`.
So a restored lane knows which positions may have been running: those below `started_upto` that are not
finished, the suspects. They run first. After two restores in a row that found suspects they are kept apart
and run one at a time, each named in `probing` while nothing else runs; a restore that finds one named gives
it up. A done-set left cleanly says that nothing was running: so the next owner writes another before anything
starts, and goes on with what was counted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from schemas.ids import BatchId
from schemas.records import DoneSet, Step
from streams.core import bitmap
from streams.core.extents import Positions, Run
from streams.core.standstill import CAREFUL_AFTER

RESERVE = 32
"""Positions covered ahead of the ones that start: one done-set for that many starts."""

MOST_ATTEMPTS_KEPT = 256
"""Records whose attempts a done-set carries; when more wait, a server is failing them all."""


class Lane:
    """One batch in one partition. `now` never enters: the caller decides when to write a done-set."""

    def __init__(
        self,
        batch: BatchId,
        attempt: str,
        topic: str,
        partition: int,
        runs: list[Run],
        restored: DoneSet | None,
    ) -> None:
        self.batch = batch
        self.attempt = attempt
        self.topic = topic
        self.partition = partition
        self.positions = Positions(runs)
        self.finished = bitmap.empty(self.positions.count)
        self.running: set[int] = set()
        self.starts = 0
        """How many times a record was started."""
        self.started_upto = 0
        self.results_upto = 0
        self.crashes = 0
        self.probing: int | None = None
        self.given_up: int | None = None
        self.suspects: deque[int] = deque()
        """Read before what is fresh, by whoever reads the lane."""
        self.apart: deque[int] = deque()
        """Suspects that run one at a time: `next_read` does not give them."""
        self.attempts: dict[int, int] = {}
        """By position: attempts that failed, of records that will have another, whoever makes it."""
        self.steps: dict[int, Step] = {}
        """By position: the last step that a workflow record finished in an earlier run; it goes on there."""
        self._steps_since: dict[int, int] = {}
        """By position: where in `results` the first of those lies."""
        self._suspected: set[int] = set()
        if restored is not None:
            self._restore(restored)
        self.acked_upto = 0 if self.suspects or self.apart else self.started_upto
        """Positions below this are covered by an acknowledged done-set, which does not say they were left."""
        self._fresh = self.started_upto
        self._low = 0

    def _restore(self, done: DoneSet) -> None:
        size = min(len(done.finished), len(self.finished))
        self.finished[:size] = done.finished[:size]
        self.started_upto = min(done.started_upto, self.positions.count)
        self.results_upto = done.results_upto
        suspects = list(bitmap.unset(self.finished, self.started_upto))
        self._count_attempts(done)
        if not suspects:
            return
        self.crashes = done.crashes + (not done.clean)
        if self.crashes:
            self._suspected.update(suspects)
        if done.probing in self._suspected:
            self.given_up = done.probing
            suspects.sort(key=lambda position: position != self.given_up)
        (self.apart if self.careful else self.suspects).extend(suspects)

    @property
    def careful(self) -> bool:
        """Whether the suspects must run one at a time."""
        return self.crashes >= CAREFUL_AFTER and bool(self._suspected)

    def runs_alone(self, position: int) -> bool:
        """Whether it is a suspect that must not run beside others."""
        return self.careful and position in self._suspected

    @property
    def suspected(self) -> int:
        """How many records were running at the last crash, for all that is known."""
        return len(self._suspected)

    @property
    def unfinished(self) -> int:
        return self.positions.count - bitmap.count(self.finished)

    @property
    def anything_unread(self) -> bool:
        return bool(self.suspects) or self._fresh < self.positions.count

    @property
    def next_unread(self) -> int | None:
        """The position that is read next."""
        if self.suspects:
            return self.suspects[0]
        return self._fresh if self._fresh < self.positions.count else None

    @property
    def unread_count(self) -> int:
        return len(self.suspects) + self.positions.count - self._fresh

    @property
    def lowest_unfinished_offset(self) -> int | None:
        """The offset below which everything of this batch is finished; None when all is."""
        self._low = bitmap.first_unset(self.finished, self.positions.count, self._low)
        return None if self._low == self.positions.count else self.positions.offset(self._low)

    def next_read(self, most: int) -> tuple[int, int] | None:
        """The next positions to read, `(first, last)` inclusive and contiguous in the log; None when done.

        Marks them read. Finished ones may lie between; skip them with `is_finished`.
        """
        if self.suspects:
            first = self.suspects.popleft()
            last = first
            limit = self._last_of_run(first, most)
            while (
                self.suspects
                and last < self.suspects[0] <= limit
                and self._all_finished(last + 1, self.suspects[0])
            ):
                last = self.suspects.popleft()
            return first, last
        if self._fresh >= self.positions.count:
            return None
        first = self._fresh
        last = self._last_of_run(first, most)
        self._fresh = last + 1
        return first, last

    def unread(self, first: int, last: int) -> None:
        """Give a read back: it failed and will be made again."""
        for position in range(last, first - 1, -1):
            if not self.is_finished(position):
                (self.apart if self.runs_alone(position) else self.suspects).appendleft(position)

    def is_finished(self, position: int) -> bool:
        return bitmap.get(self.finished, position)

    def reserve(self, position: int) -> bool:
        """Cover `position` and some beyond it; whether a done-set must be written for that.

        Asked early enough, the done-set is acknowledged before the positions it covers are due.
        """
        ahead = RESERVE if self.crashes == 0 else 1
        wanted = min(self.positions.count, position + 1 + ahead // 2)
        if wanted <= self.started_upto:
            return False
        self.started_upto = min(self.positions.count, position + 1 + ahead)
        return True

    def absorb(self, done: DoneSet) -> None:
        """Somebody else may have run this lane since: what is finished there is finished."""
        merged = int.from_bytes(self.finished, "little") | int.from_bytes(done.finished, "little")
        self.finished[:] = merged.to_bytes(len(self.finished), "little")
        self.attempts = {p: n for p, n in self.attempts.items() if not self.is_finished(p)}
        self._count_attempts(done)
        started_upto = min(done.started_upto, self.positions.count)
        self.started_upto = max(self.started_upto, started_upto)
        self.acked_upto = 0 if done.clean else max(self.acked_upto, started_upto)
        if self._fresh < started_upto:
            unread = bitmap.unset(self.finished, started_upto, self._fresh)
            self.suspects.extend(unread)
            self._fresh = started_upto

    def _count_attempts(self, done: DoneSet) -> None:
        for position, attempts in done.attempts.items():
            if position < self.positions.count:
                self.failed(position, attempts)

    def lost(self, waiting: Iterable[int]) -> Iterator[int]:
        """Positions that were read and neither wait nor run nor are finished."""
        known = bytearray(self.finished)
        for position in chain(waiting, self.running, self.suspects, self.apart, (self.probing,)):
            if position is not None:
                bitmap.set_bit(known, position)
        return bitmap.unset(known, self._fresh, self._low)

    def start(self, position: int) -> None:
        self.starts += 1
        self.running.add(position)

    def abandon(self, position: int) -> None:
        """The record will not run to its end here (cancelled, expired, handed over)."""
        self.running.discard(position)

    def failed(self, position: int, attempts: int) -> None:
        """So many attempts of the record have failed, and it will have another."""
        if not self.is_finished(position):
            self.attempts[position] = max(attempts, self.attempts.get(position, 0))

    def finish(self, position: int, results_upto: int) -> None:
        """The result is acknowledged, below `results_upto`. The last suspect ends the suspicion."""
        self.running.discard(position)
        self.results_upto = max(self.results_upto, results_upto)
        bitmap.set_bit(self.finished, position)
        self.attempts.pop(position, None)
        self.steps.pop(position, None)
        self._steps_since.pop(position, None)
        if self.probing == position:
            self.probing = None
        if self.given_up == position:
            self.given_up = None
        if self.crashes:
            self._suspected.discard(position)
            if not self._suspected:
                self.crashes = 0

    def wrote_step(self, position: int, offset: int) -> None:
        """A workflow record has written a step down, at this offset of `results`."""
        if not self.is_finished(position):
            self._steps_since.setdefault(position, offset)

    def restore_step(self, step: Step, offset: int) -> None:
        """A step that an earlier run wrote down, in the order of offsets; the first of a number holds."""
        position = step.origin[1]
        if self.is_finished(position):
            return
        self.wrote_step(position, offset)
        known = self.steps.get(position)
        if known is None or step.step > known.step:
            self.steps[position] = step

    def done_set(self, *, clean: bool) -> DoneSet:
        return DoneSet(
            batch=self.batch,
            attempt=self.attempt,
            topic=self.topic,
            partition=self.partition,
            finished=bytes(self.finished).rstrip(b"\0"),
            started_upto=self.started_upto,
            results_upto=self.results_upto,
            crashes=self.crashes,
            probing=self.given_up if clean or self.probing is None else self.probing,
            clean=clean,
            steps_from=min(self._steps_since.values(), default=None),
            attempts=self._most_tried(),
        )

    def _most_tried(self) -> dict[int, int]:
        if len(self.attempts) <= MOST_ATTEMPTS_KEPT:
            return dict(self.attempts)
        most = heapq.nlargest(MOST_ATTEMPTS_KEPT, self.attempts.items(), key=lambda item: item[1])
        return dict(most)

    def key(self) -> str:
        """Kafka key of the done-set."""
        return done_key(self.topic, self.partition, self.batch, self.attempt)

    def _all_finished(self, first: int, end: int) -> bool:
        """Whether every position from `first` up to `end` (exclusive) is: others may be under way."""
        return all(self.is_finished(position) for position in range(first, end))

    def _last_of_run(self, first: int, most: int) -> int:
        offset = self.positions.offset(first)
        return first + min(most - 1, self.positions.run_end(first) - offset)


def done_key(topic: str, partition: int, batch: BatchId, attempt: str) -> str:
    return f"{topic}:{partition}:{batch}:{attempt}"
