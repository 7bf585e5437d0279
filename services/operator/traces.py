"""What a running batch has left in the topics and in storage, read once.

The reading order matters: whoever wrote a trace had what lies behind it acknowledged before. So done-sets are
read first, then the offset the arbiter has reached, its ledger, the results beyond, and the lines last: what
an earlier one counts, a later one must show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from schemas import topics
from schemas.ids import BatchId
from schemas.records import Answered, DoneSet, Failed, Ledger, Line, Request, Result, ResultLine
from schemas.settings import Settings
from services.operator.log import Log
from streams.blobs.port import Blobs
from streams.core.extents import Positions
from streams.core.lifecycle import BatchState
from streams.sink import segments

_decode_done = msgspec.json.Decoder(DoneSet).decode
_decode_ledger = msgspec.json.Decoder(Ledger).decode
_decode_result = msgspec.json.Decoder(Result).decode
_decode_line = msgspec.json.Decoder(ResultLine).decode
_decode_request = msgspec.json.Decoder(Request).decode


class Traces:
    """Construct it to read them all; blocks, raises KafkaFailed."""

    def __init__(self, settings: Settings, blobs: Blobs, log: Log, state: BatchState) -> None:
        assert state.created is not None
        self._log = log
        self._blobs = blobs
        self._partitions = settings.kafka.partitions
        self._enqueued = state.enqueued
        self._batch: BatchId = state.created.batch
        self._home = topics.partition_of(self._batch, self._partitions)
        self.done: dict[int, DoneSet] = {}
        """By request partition."""
        self.done_at_ms: dict[int, int] = {}
        self.model_moved_at_ms = 0
        """When a done-set of any batch of the model was written last, where this batch's are written."""
        self._read_done_sets()
        decided = self._reached("settle", topics.RESULTS)
        self.ledger = self._read_ledger()
        self.undecided = self._read_results(decided if self.ledger is None else self.ledger.upto)
        """Records with a result that the ledger does not know of yet."""
        self.output_lines = self._read_lines(topics.OUTPUTS)
        """Records with a line in a segment, or in the log where the sink has yet to make one."""
        self.error_lines = self._read_lines(topics.ERRORS)

    def indices(self, partition: int, positions: Iterable[int]) -> Iterator[int]:
        """The records at these positions of a request partition, read one by one."""
        assert self._enqueued is not None
        lane = Positions(self._enqueued.extents[partition])
        for position in positions:
            message = self._log.one(self._enqueued.topic, partition, lane.offset(position))
            assert message.value is not None
            yield _decode_request(message.value).index

    def all_indices(self, partition: int) -> Iterator[int]:
        """The same for all positions, in order."""
        assert self._enqueued is not None
        for first, last in self._enqueued.extents[partition]:
            for message in self._log.partition(self._enqueued.topic, partition, first, last + 1):
                assert message.value is not None
                yield _decode_request(message.value).index

    def _read_done_sets(self) -> None:
        enqueued = self._enqueued
        if enqueued is None:
            return
        places = {topics.partition_of(f"{enqueued.topic}:{p}", self._partitions) for p in enqueued.extents}
        for place in sorted(places):
            for message in self._log.partition(topics.DONE, place):
                if not (message.key or "").startswith(f"{enqueued.topic}:"):
                    continue
                self.model_moved_at_ms = max(self.model_moved_at_ms, message.timestamp_ms)
                if message.value is not None and f":{self._batch}:{enqueued.attempt}" in str(message.key):
                    done = _decode_done(message.value)
                    self.done[done.partition] = done
                    self.done_at_ms[done.partition] = message.timestamp_ms

    def _reached(self, group: str, topic: str) -> int:
        place = (topic, self._home)
        return self._log.admin.committed(group, [place]).get(place, 0)

    def _read_ledger(self) -> Ledger | None:
        latest = None
        for message in self._log.partition(topics.LEDGER, self._home):
            if message.key == self._batch:
                latest = None if message.value is None else _decode_ledger(message.value)
        return latest

    def _read_results(self, start: int) -> set[int]:
        found = set()
        for message in self._log.partition(topics.RESULTS, self._home, start):
            if message.key == self._batch and message.value is not None:
                result = _decode_result(message.value)
                if isinstance(result, Answered | Failed):
                    found.add(result.index)
        return found

    def _read_lines(self, topic: str) -> set[int]:
        found = set()
        for message in self._log.partition(topic, self._home, self._reached("sink", topic)):
            if message.key == self._batch and message.value is not None:
                line = _decode_line(message.value)
                if isinstance(line, Line):
                    found.add(line.index)
        for name in segments.names(self._blobs, self._batch, topic):
            found.update(index for index, _ in segments.read(self._blobs, name))
        return found
