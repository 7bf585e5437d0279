"""The sink process: one thread that reads and writes segments, one that merges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import structlog

from schemas import topics
from schemas.facts import BatchFact, Ended, batch_key
from schemas.ids import BatchId
from schemas.records import Line, Remainder, ResultLine
from schemas.settings import Settings
from streams import metrics
from streams.blobs.port import Blobs
from streams.core.lifecycle import BatchState, OpenBatches, ended
from streams.crashpoints import passing
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.follow import Follower
from streams.kafka.group import GroupReader
from streams.kafka.messages import KafkaFailed, Message
from streams.kafka.producer import Producer
from streams.sink import segments
from streams.sink.files import Incomplete, publish
from streams.sink.segments import Buffer

GROUP = "sink"
CONSUME = 500
CONSUME_WAIT_S = 0.05
SEGMENT_BYTES = 4 * 1024 * 1024
SEGMENT_AGE_S = 300.0
BUFFERED_BYTES = 64 * 1024 * 1024
"""Of all batches together; beyond it the largest buffer becomes a segment."""

COMMIT_EVERY_S = 1.0
RETRY_S = 2.0
CATCH_UP_S = 120.0
LATELY_MS = 3_600_000
"""A sink that starts cleans up behind batches that ended since then."""

log = structlog.get_logger("openrelay.sink")

_decode_fact = msgspec.json.Decoder(BatchFact).decode
_decode_line = msgspec.json.Decoder(ResultLine).decode
_encode = msgspec.json.Encoder().encode

_Place = tuple[str, int, BatchId]


class _Ending:
    """A settled batch on its way to its files."""

    def __init__(self, state: BatchState, targets: dict[TopicPartition, int]) -> None:
        self.state = state
        self.targets = targets
        self.merging: Future[Ended] | None = None
        self.not_before = 0.0


class Sink:
    """`run` blocks until told to stop; raises KafkaFailed when the log is out of reach."""

    def __init__(self, settings: Settings, instance: str, blobs: Blobs) -> None:
        self._settings = settings
        self._instance = instance
        self._blobs = blobs
        self._lock = threading.Lock()
        self._settled: dict[BatchId, BatchState] = {}
        """Batches of any partition that are settled and have not ended."""
        self._batches = OpenBatches(ended)
        self._ended_lately: list[BatchId] = []
        self._positions: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._buffers: dict[_Place, Buffer] = {}
        self._endings: dict[BatchId, _Ending] = {}
        self._admin = Admin(settings.kafka, f"openrelay-{instance}-admin")
        self._follower = Follower(
            settings.kafka, f"openrelay-{instance}-facts", [topics.BATCHES], self._apply_facts
        )
        self._producer = Producer(settings.kafka, f"openrelay-{instance}-facts-out")
        self._merger = ThreadPoolExecutor(1, thread_name_prefix="merge")

    def run(self, stopping: threading.Event, ready: Callable[[], None]) -> None:
        self._follower.start()
        self._follower.wait_caught_up(CATCH_UP_S)
        group = GroupReader(
            self._settings.kafka,
            GROUP,
            self._instance,
            [topics.OUTPUTS, topics.ERRORS],
            on_assigned=self._assigned,
            on_revoked=lambda partitions: self._revoked(group, partitions),
            on_lost=self._lost,
        )
        ready()
        committed_at = time.monotonic()
        try:
            while not stopping.is_set():
                for message in group.consume(CONSUME, CONSUME_WAIT_S):
                    self._buffer(message)
                self._write_due()
                self._end_settled()
                if time.monotonic() - committed_at >= COMMIT_EVERY_S:
                    self._commit(group)
                    committed_at = time.monotonic()
                if self._follower.failure is not None:
                    raise KafkaFailed("facts can no longer be followed") from self._follower.failure
        finally:
            self._merger.shutdown(wait=True)
            group.close()
            self._follower.stop()
            self._producer.close()

    # ---- facts ----

    def _apply_facts(self, messages: list[Message]) -> None:
        """In the follower's thread."""
        lately_ms = time.time_ns() // 1_000_000 - LATELY_MS
        with self._lock:
            for message in messages:
                if message.value is None:
                    continue
                fact = _decode_fact(message.value)
                batch = fact.batch
                state = self._batches.fold(fact, message.timestamp_ms)
                if state is None:
                    continue
                if ended(state):
                    self._settled.pop(batch, None)
                    if state.ended_at_ms > lately_ms:
                        self._ended_lately.append(batch)
                elif state.settled is not None and state.created is not None:
                    self._settled[batch] = state

    def _is_mine(self, batch: BatchId) -> bool:
        p = topics.partition_of(batch, self._settings.kafka.partitions)
        return (topics.OUTPUTS, p) in self._positions

    # ---- partitions ----

    def _assigned(self, committed: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        self._positions |= committed
        self._committed |= committed
        return committed

    def _revoked(self, group: GroupReader, partitions: list[TopicPartition]) -> None:
        for place in [place for place in self._buffers if place[:2] in partitions]:
            self._write(place)
        self._commit(group)
        self._lost(partitions)

    def _lost(self, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._positions.pop(partition, None)
            self._committed.pop(partition, None)
        self._buffers = {k: b for k, b in self._buffers.items() if k[:2] not in partitions}
        self._endings = {b: e for b, e in self._endings.items() if self._is_mine(b)}

    # ---- lines ----

    def _buffer(self, message: Message) -> None:
        where = (message.topic, message.partition)
        if where not in self._positions:
            return
        assert message.value is not None
        line = _decode_line(message.value)
        metrics.SINK_LINES.labels(message.topic).inc()
        self._positions[where] = message.offset + 1
        if self._batches.is_gone(line.batch):
            return
        if isinstance(line, Remainder):
            self._blobs.put(segments.remainder_name(line.batch), message.value)
            return
        assert isinstance(line, Line)
        place = (*where, line.batch)
        buffer = self._buffers.get(place)
        if buffer is None:
            buffer = self._buffers[place] = Buffer(message.offset, time.monotonic())
        buffer.add(message.offset, line.index, message.value)

    def _write_due(self) -> None:
        now = time.monotonic()
        for place in [
            place
            for place, buffer in self._buffers.items()
            if buffer.size >= SEGMENT_BYTES or now - buffer.opened_at >= SEGMENT_AGE_S
        ]:
            self._write(place)
        while sum(buffer.size for buffer in self._buffers.values()) > BUFFERED_BYTES:
            self._write(max(self._buffers, key=lambda place: self._buffers[place].size))

    def _write(self, place: _Place) -> None:
        topic, partition, batch = place
        self._buffers.pop(place).write(self._blobs, batch, topic, partition)
        metrics.SEGMENTS.inc()
        passing("sink.segment")

    def _commit(self, group: GroupReader) -> None:
        """Everything below is in a segment, or of a batch that has ended."""
        safe = dict(self._positions)
        for (topic, partition, _), buffer in self._buffers.items():
            where = (topic, partition)
            safe[where] = min(safe[where], buffer.first)
        moved = {where: offset for where, offset in safe.items() if offset != self._committed.get(where)}
        if group.commit(moved):
            self._committed |= moved
            passing("sink.committed")

    # ---- ends ----

    def _end_settled(self) -> None:
        with self._lock:
            settled = {b: state for b, state in self._settled.items() if b not in self._endings}
            over, self._ended_lately = self._ended_lately, []
        for batch in over:
            if self._is_mine(batch):
                self._merger.submit(segments.remove, self._blobs, batch)
        for batch, state in settled.items():
            if self._is_mine(batch):
                self._endings[batch] = _Ending(state, self._ends_of(batch))
        now = time.monotonic()
        for batch, ending in list(self._endings.items()):
            if ending.merging is not None and ending.merging.done():
                self._merged(batch, ending)
            elif ending.merging is None and now >= ending.not_before and self._has_read(ending):
                self._start_merge(batch, ending)

    def _ends_of(self, batch: BatchId) -> dict[TopicPartition, int]:
        """All lines of a settled batch lie below these offsets: they were there before `settled` was."""
        p = topics.partition_of(batch, self._settings.kafka.partitions)
        return self._admin.end_offsets([(topics.OUTPUTS, p), (topics.ERRORS, p)])

    def _has_read(self, ending: _Ending) -> bool:
        return all(self._positions.get(where, -1) >= end for where, end in ending.targets.items())

    def _start_merge(self, batch: BatchId, ending: _Ending) -> None:
        for place in [place for place in self._buffers if place[2] == batch]:
            self._write(place)
        merge = metrics.MERGE_SECONDS.time()(publish)
        most = self._settings.limits.max_record_bytes
        ending.merging = self._merger.submit(merge, self._blobs, ending.state, most)

    def _merged(self, batch: BatchId, ending: _Ending) -> None:
        assert ending.merging is not None
        try:
            fact = ending.merging.result()
        except Incomplete as error:
            metrics.MERGES.labels("incomplete").inc()
            log.error("result files do not add up, will be tried again", batch=batch, error=str(error))
            ending.merging = None
            ending.not_before = time.monotonic() + RETRY_S
            ending.targets = self._ends_of(batch)
            return
        passing("sink.files")
        partition = topics.partition_of(batch, self._settings.kafka.partitions)
        self._producer.send(
            topics.BATCHES, _encode(fact), key=batch_key(fact, self._instance), partition=partition
        )
        self._producer.flush()
        passing("sink.ended")
        with self._lock:
            self._settled.pop(batch, None)
            self._batches.drop(batch)
        del self._endings[batch]
        self._merger.submit(segments.remove, self._blobs, batch)
        metrics.MERGES.labels("ended").inc()
        log.info("batch ended", batch=batch, status=fact.status)
