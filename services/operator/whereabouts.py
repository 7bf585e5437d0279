"""Where the records of a batch that has not ended are, as far as the topics and storage tell.

    created ─► laid out ─► finished by the dispatcher ─► verdict ─► line in a segment

Each stage says what it has done after the next one's input is acknowledged, so the logs are read in the order
done-sets, ledger, results, lines: what an earlier one counts, a later one must show. A record that an earlier
one counts and a later one lacks is lost. Whether a record that was started still runs only its dispatcher
knows, so it counts as in flight for as long as one call may take and `stuck_after_s` beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from schemas import topics
from schemas.ids import BatchId
from schemas.records import Answered, DoneSet, Failed, Ledger, Line, Request, Result, ResultLine
from schemas.settings import Limits, Settings
from services.operator.log import Log
from streams.blobs.port import Blobs
from streams.core import bitmap
from streams.core.extents import Positions
from streams.core.lifecycle import BatchState
from streams.sink import segments

NAMED = 10
"""Records of one kind of trouble that are named one by one."""

_decode_done = msgspec.json.Decoder(DoneSet).decode
_decode_ledger = msgspec.json.Decoder(Ledger).decode
_decode_result = msgspec.json.Decoder(Result).decode
_decode_line = msgspec.json.Decoder(ResultLine).decode
_decode_request = msgspec.json.Decoder(Request).decode


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """Records that are neither settled nor, for all that can be known, in flight."""

    said: str
    count: int
    indices: list[int] = []
    """The first of them."""


class LaneState(msgspec.Struct, frozen=True, kw_only=True):
    """The batch in one request partition."""

    partition: int
    records: int
    started_upto: int = 0
    finished: int = 0
    crashes: int = 0
    probing: int | None = None
    idle_s: float = 0.0
    """Since its done-set was written, or since it was laid out."""


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    accepted: int
    laid_out: int | None
    """None: not yet."""
    topic: str | None
    lanes: list[LaneState]
    finished: int
    verdicts: int
    """By the ledger."""
    results_waiting: int
    """In the log behind the ledger."""
    output_lines: int
    error_lines: int
    """In segments, or on their way to one."""
    settled: bool
    stuck: list[Stuck]


def whereabouts(settings: Settings, blobs: Blobs, log: Log, state: BatchState, now_ms: int) -> Whereabouts:
    """Blocks; raises KafkaFailed."""
    return _Search(settings, blobs, log, state, now_ms).run()


class _Search:
    def __init__(self, settings: Settings, blobs: Blobs, log: Log, state: BatchState, now_ms: int) -> None:
        assert state.created is not None
        self._partitions = settings.kafka.partitions
        self._limits: Limits = settings.limits
        self._blobs = blobs
        self._log = log
        self._state = state
        self._batch: BatchId = state.created.batch
        self._home = topics.partition_of(self._batch, self._partitions)
        self._now_ms = now_ms
        self._stuck: list[Stuck] = []

    def run(self) -> Whereabouts:
        enqueued = self._state.enqueued
        done, moved_ms = self._done_sets()
        lanes = self._lanes(done, moved_ms)
        ledger = self._ledger()
        waiting = self._results(ledger)
        lines = {topic: self._lines(topic) for topic in (topics.OUTPUTS, topics.ERRORS)}
        seen = bitmap.empty(0) if ledger is None else bytearray(ledger.seen)
        finished = sum(lane.finished for lane in lanes)
        if self._state.settled is not None:
            self._not_ended()
        else:
            self._not_laid_out()
            if ledger is not None and not ledger.settled:
                self._without_line(seen, lines[topics.OUTPUTS] | lines[topics.ERRORS])
            self._without_verdict(done, finished, seen, waiting)
            self._idle(done, lanes, moved_ms)
        return Whereabouts(
            accepted=self._state.accepted,
            laid_out=None if enqueued is None else sum(lane.records for lane in lanes),
            topic=None if enqueued is None else enqueued.topic,
            lanes=lanes,
            finished=finished,
            verdicts=0 if ledger is None else ledger.completed + ledger.failed,
            results_waiting=len(waiting),
            output_lines=len(lines[topics.OUTPUTS]),
            error_lines=len(lines[topics.ERRORS]),
            settled=self._state.settled is not None,
            stuck=self._stuck,
        )

    # ---- reading ----

    def _done_sets(self) -> tuple[dict[int, tuple[DoneSet, int]], int]:
        """By request partition, the done-set and its time; and when any batch of the model moved last."""
        enqueued = self._state.enqueued
        if enqueued is None:
            return {}, 0
        found: dict[int, tuple[DoneSet, int]] = {}
        moved_ms = 0
        places = {topics.partition_of(f"{enqueued.topic}:{p}", self._partitions) for p in enqueued.extents}
        for place in sorted(places):
            for message in self._log.partition(topics.DONE, place):
                if not (message.key or "").startswith(f"{enqueued.topic}:"):
                    continue
                moved_ms = max(moved_ms, message.timestamp_ms)
                if message.value is not None and f":{self._batch}:{enqueued.attempt}" in str(message.key):
                    done = _decode_done(message.value)
                    found[done.partition] = (done, message.timestamp_ms)
        return found, moved_ms

    def _lanes(self, done: dict[int, tuple[DoneSet, int]], moved_ms: int) -> list[LaneState]:
        lanes = []
        enqueued = self._state.enqueued
        for partition, runs in sorted(enqueued.extents.items()) if enqueued is not None else ():
            records = Positions(runs).count
            if partition not in done:
                idle_s = self._since_s(self._state.enqueued_at_ms)
                lanes.append(LaneState(partition=partition, records=records, idle_s=idle_s))
                continue
            found, at_ms = done[partition]
            lanes.append(
                LaneState(
                    partition=partition,
                    records=records,
                    started_upto=found.started_upto,
                    finished=bitmap.count(found.finished),
                    crashes=found.crashes,
                    probing=found.probing,
                    idle_s=self._since_s(at_ms),
                )
            )
        return lanes

    def _ledger(self) -> Ledger | None:
        latest = None
        for message in self._log.partition(topics.LEDGER, self._home):
            if message.key == self._batch:
                latest = None if message.value is None else _decode_ledger(message.value)
        return latest

    def _results(self, ledger: Ledger | None) -> set[int]:
        """Records with a result that the ledger does not know of yet."""
        place = (topics.RESULTS, self._home)
        start = self._log.admin.committed("settle", [place]).get(place, 0) if ledger is None else ledger.upto
        found = set()
        for message in self._log.partition(*place, start):
            if message.key == self._batch and message.value is not None:
                result = _decode_result(message.value)
                if isinstance(result, Answered | Failed):
                    found.add(result.index)
        return found

    def _lines(self, topic: str) -> set[int]:
        """Records with a line in a segment, or in the log where the sink has yet to make one."""
        place = (topic, self._home)
        start = self._log.admin.committed("sink", [place]).get(place, 0)
        found = set()
        for message in self._log.partition(*place, start):
            if message.key == self._batch and message.value is not None:
                line = _decode_line(message.value)
                if isinstance(line, Line):
                    found.add(line.index)
        for name in segments.names(self._blobs, self._batch, topic):
            found.update(index for index, _ in segments.read(self._blobs, name))
        return found

    # ---- judging ----

    def _not_laid_out(self) -> None:
        waited_s = self._since_s(self._state.created_at_ms)
        if self._state.enqueued is None and waited_s > self._limits.stuck_after_s:
            said = f"created {waited_s:.0f} s ago and not laid out in the request topic: does intake run?"
            self._say(said, range(self._state.accepted), self._state.accepted)

    def _not_ended(self) -> None:
        waited_s = self._since_s(self._state.settled_at_ms)
        if waited_s > self._limits.stuck_after_s:
            self._stuck.append(
                Stuck(
                    said=f"settled {waited_s:.0f} s ago, and its files are not made: does the sink run?",
                    count=self._state.accepted,
                )
            )

    def _without_line(self, seen: bytearray, lines: set[int]) -> None:
        lost = [index for index in _set_bits(seen) if index not in lines]
        self._say("has a verdict and no line in any segment or topic", lost, len(lost))

    def _without_verdict(
        self, done: dict[int, tuple[DoneSet, int]], finished: int, seen: bytearray, waiting: set[int]
    ) -> None:
        if finished <= len(waiting | set(_set_bits(seen))):
            return
        lost = [
            index
            for found, _ in done.values()
            for position, index in enumerate(self._all_indices(found.partition))
            if bitmap.get(found.finished, position) and not bitmap.get(seen, index) and index not in waiting
        ]
        self._say("was finished by the dispatcher and has no result in the log", lost, len(lost))

    def _idle(self, done: dict[int, tuple[DoneSet, int]], lanes: list[LaneState], moved_ms: int) -> None:
        """Records of lanes in which nothing happens although it should."""
        bound_s = self._limits.stuck_after_s
        for lane in lanes:
            finished = bytearray(done[lane.partition][0].finished) if lane.partition in done else bytearray()
            running = list(bitmap.unset(finished, lane.started_upto))
            if running and lane.idle_s > bound_s + self._limits.request_time_limit_s:
                said = f"started in partition {lane.partition}, and no result for {lane.idle_s:.0f} s"
                self._say(said, self._indices(lane.partition, running[:NAMED]), len(running))
            unstarted = lane.records - lane.started_upto
            if unstarted and min(lane.idle_s, self._since_s(moved_ms)) > bound_s:
                said = (
                    f"not started in partition {lane.partition}, and nothing of the model moved for "
                    f"{min(lane.idle_s, self._since_s(moved_ms)):.0f} s: no dispatcher, no server in service?"
                )
                first = range(lane.started_upto, min(lane.records, lane.started_upto + NAMED))
                self._say(said, self._indices(lane.partition, first), unstarted)

    def _say(self, said: str, indices: Iterable[int], count: int) -> None:
        if count:
            self._stuck.append(Stuck(said=said, count=count, indices=list(islice(indices, NAMED))))

    def _indices(self, partition: int, positions: Iterable[int]) -> Iterator[int]:
        """The records at these positions of a request partition."""
        enqueued = self._state.enqueued
        assert enqueued is not None
        lane = Positions(enqueued.extents[partition])
        for position in positions:
            message = self._log.one(enqueued.topic, partition, lane.offset(position))
            assert message.value is not None
            yield _decode_request(message.value).index

    def _all_indices(self, partition: int) -> Iterator[int]:
        """The same for all positions, in order."""
        enqueued = self._state.enqueued
        assert enqueued is not None
        for first, last in enqueued.extents[partition]:
            for message in self._log.partition(enqueued.topic, partition, first, last + 1):
                assert message.value is not None
                yield _decode_request(message.value).index

    def _since_s(self, at_ms: int) -> float:
        return max(0.0, (self._now_ms - at_ms) / 1000)


def _set_bits(bits: bytearray) -> Iterator[int]:
    return (bit for bit in range(len(bits) * 8) if bitmap.get(bits, bit))
