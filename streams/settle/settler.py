"""The settle process: one thread that reads, decides and writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from schemas import topics
from schemas.facts import BatchFact, Progress, batch_key
from schemas.ids import BatchId
from schemas.records import Ledger, Result
from schemas.settings import Settings
from streams import metrics
from streams.core import pricing
from streams.core.lifecycle import BatchState, OpenBatches, ended
from streams.core.verdicts import Effects, decide, nudge, spec_of
from streams.crashpoints import passing
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.follow import Follower
from streams.kafka.group import GroupReader
from streams.kafka.messages import KafkaFailed, Message
from streams.kafka.producer import Producer
from streams.kafka.reader import PositionReader
from streams.settle.counting import count
from streams.settle.partition import Partition

GROUP = "settle"
CONSUME = 500
CONSUME_WAIT_S = 0.05
FLUSH_EVERY_S = 0.25
NUDGE_EVERY_S = 0.25
LEDGER_TIMEOUT_S = 60.0
CATCH_UP_S = 120.0

log = structlog.get_logger("openrelay.settle")

_decode_fact = msgspec.json.Decoder(BatchFact).decode
_decode_result = msgspec.json.Decoder(Result).decode
_decode_ledger = msgspec.json.Decoder(Ledger).decode
_encode = msgspec.json.Encoder().encode


class Settler:
    """`run` blocks until told to stop; raises KafkaFailed when the log is out of reach."""

    def __init__(self, settings: Settings, instance: str) -> None:
        self._settings = settings
        self._grace_ms = round(settings.limits.expiry_grace_s * 1000)
        self._instance = instance
        self._lock = threading.Lock()
        self._batches = OpenBatches(ended)
        self._ended: list[BatchId] = []
        self._partitions: dict[int, Partition] = {}
        self._nudged: set[BatchId] = set()
        self._admin = Admin(settings.kafka, f"openrelay-{instance}-admin")
        self._follower = Follower(
            settings.kafka, f"openrelay-{instance}-facts", [topics.BATCHES], self._apply_facts
        )
        self._producer = Producer(settings.kafka, f"openrelay-{instance}-effects")
        self.waste = 0
        """Results that came second."""

    def run(self, stopping: threading.Event, ready: Callable[[], None]) -> None:
        self._follower.start()
        self._follower.wait_caught_up(CATCH_UP_S)
        group = GroupReader(
            self._settings.kafka,
            GROUP,
            self._instance,
            [topics.RESULTS],
            on_assigned=self._assigned,
            on_revoked=lambda partitions: self._revoked(group, partitions),
            on_lost=self._lost,
        )
        ready()
        flushed_at = nudged_at = time.monotonic()
        try:
            while not stopping.is_set():
                messages = group.consume(CONSUME, CONSUME_WAIT_S)
                for message in messages:
                    self._decide(message)
                now = time.monotonic()
                if not messages or now - flushed_at >= FLUSH_EVERY_S:
                    self._flush(group)
                    flushed_at = time.monotonic()
                if now - nudged_at >= NUDGE_EVERY_S:
                    self._nudge()
                    nudged_at = now
                if self._follower.failure is not None:
                    raise KafkaFailed("facts can no longer be followed") from self._follower.failure
            self._flush(group)
        finally:
            group.close()
            self._follower.stop()
            self._producer.close()

    # ---- facts ----

    def _apply_facts(self, messages: list[Message]) -> None:
        """In the follower's thread."""
        with self._lock:
            for message in messages:
                if message.value is None:
                    continue
                fact = _decode_fact(message.value)
                state = self._batches.fold(fact, message.timestamp_ms)
                if state is not None and ended(state):
                    self._ended.append(fact.batch)

    def _state(self, batch: BatchId) -> BatchState | None:
        """None when the batch is settled: every line it gets is written, whatever still comes is waste.

        A batch nobody has heard of, even after asking again, is a lost fact.
        """
        for attempt in ("now", "caught up"):
            with self._lock:
                if self._batches.is_gone(batch):
                    return None
                state = self._batches.states.get(batch)
            if state is not None and state.settled is not None:
                return None
            if state is not None and state.created is not None and state.enqueued is not None:
                return state
            if attempt == "now":
                self._follower.wait_caught_up(CATCH_UP_S)
        raise KafkaFailed(f"results of {batch}, of which there are no facts")

    # ---- partitions ----

    def _assigned(self, committed: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        places = [(topics.LEDGER, p) for _, p in committed]
        firsts, ends = self._admin.first_offsets(places), self._admin.end_offsets(places)
        self._follower.wait_caught_up(CATCH_UP_S)
        with self._lock:
            open_batches = {b for b, state in self._batches.states.items() if state.settled is None}
        reader = PositionReader(self._settings.kafka, f"openrelay-{self._instance}-ledger", 1)
        starts = {}
        try:
            for (topic, p), offset in committed.items():
                place = (topics.LEDGER, p)
                ledgers: dict[BatchId, Ledger] = {}
                for message in reader.read_to_end(
                    topics.LEDGER, p, firsts[place], ends[place], LEDGER_TIMEOUT_S
                ):
                    assert message.key is not None
                    if message.value is None:
                        ledgers.pop(BatchId(message.key), None)
                    else:
                        ledgers[BatchId(message.key)] = _decode_ledger(message.value)
                partition = self._partitions[p] = Partition(p, ledgers)
                starts[(topic, p)] = partition.start(offset, open_batches)
        finally:
            reader.close()
        log.info("partitions assigned", partitions=sorted(p for _, p in starts))
        return starts

    def _revoked(self, group: GroupReader, partitions: list[TopicPartition]) -> None:
        self._flush(group)
        self._lost(partitions)

    def _lost(self, partitions: list[TopicPartition]) -> None:
        for _, p in partitions:
            self._partitions.pop(p, None)
        self._nudged.clear()

    # ---- verdicts ----

    def _decide(self, message: Message) -> None:
        partition = self._partitions.get(message.partition)
        if partition is None:
            return
        assert message.value is not None
        result = _decode_result(message.value)
        partition.position = message.offset + 1
        tally = partition.tallies.get(result.batch)
        if tally is None:
            state = self._state(result.batch)
            spec = None if state is None else spec_of(state, pricing.billing_month(state.created_at_ms))
            if spec is None:
                self.waste += 1
                metrics.WASTE.inc()
                return
            tally = partition.open(spec)
        effects = decide(partition.specs[result.batch], tally, message.offset, message.timestamp_ms, result)
        partition.touched.add(result.batch)
        count(partition.specs[result.batch], effects)
        self._emit(partition, result.batch, effects)

    def _emit(self, partition: Partition, batch: BatchId, effects: Effects) -> None:
        if effects.waste:
            self.waste += 1
            return
        if effects.output is not None:
            self._producer.send(
                topics.OUTPUTS, _encode(effects.output), key=batch, partition=partition.number
            )
        if effects.error is not None:
            self._producer.send(topics.ERRORS, _encode(effects.error), key=batch, partition=partition.number)
        for line in effects.cut_off:
            self._producer.send(topics.ERRORS, _encode(line), key=batch, partition=partition.number)
        if effects.usage:
            partition.usage.setdefault(batch, []).extend(effects.usage)
        if effects.settled is not None:
            partition.settled.append(effects.settled)

    @metrics.FLUSH_SECONDS.time()
    def _flush(self, group: GroupReader) -> None:
        """The numbered steps of the package's docstring."""
        partitions = [p for p in self._partitions.values() if p.touched]
        if not partitions:
            self._forget_ended()
            return
        for partition in partitions:
            for chunk in partition.usage_chunks():
                self._producer.send(topics.USAGE, _encode(chunk), key=chunk.batch, partition=partition.number)
        self._producer.flush()
        passing("settle.effects")
        settled = [(p.number, fact) for p in partitions for fact in p.settled]
        for number, fact in settled:
            self._producer.send(
                topics.BATCHES, _encode(fact), key=batch_key(fact, self._instance), partition=number
            )
            log.info("batch settled", batch=fact.batch, completed=fact.completed, failed=fact.failed)
        if settled:
            self._producer.flush()
            passing("settle.settled")
        for partition in partitions:
            partition.settled = []
            for ledger in partition.ledgers_due():
                self._producer.send(
                    topics.LEDGER, _encode(ledger), key=ledger.batch, partition=partition.number
                )
        self._producer.flush()
        passing("settle.ledger")
        group.commit({(topics.RESULTS, p.number): p.position for p in partitions})
        passing("settle.committed")
        for partition in partitions:
            self._report(partition)
        self._forget_ended()

    def _report(self, partition: Partition) -> None:
        for batch in partition.touched:
            upto, completed, failed, usage = partition.totals(batch)
            progress = Progress(batch=batch, upto=upto, completed=completed, failed=failed, usage=usage)
            self._producer.send(topics.PROGRESS, _encode(progress), key=batch, partition=partition.number)
        partition.touched = set()

    def _forget_ended(self) -> None:
        with self._lock:
            over, self._ended = self._ended, []
        for batch in over:
            self._nudged.discard(batch)
            for partition in self._partitions.values():
                if partition.drop(batch):
                    self._producer.send(topics.LEDGER, None, key=batch, partition=partition.number)

    def _nudge(self) -> None:
        """End batches of our partitions that no dispatcher will end."""
        now_ms = time.time_ns() // 1_000_000
        partitions = self._settings.kafka.partitions
        with self._lock:
            states = [
                state
                for state in self._batches.states.values()
                if state.settled is None and state.created is not None
            ]
        for state in states:
            assert state.created is not None
            batch = state.created.batch
            closed = nudge(state, now_ms, self._grace_ms)
            if closed is None or batch in self._nudged:
                continue
            number = topics.partition_of(batch, partitions)
            if number in self._partitions:
                self._nudged.add(batch)
                self._producer.send(topics.RESULTS, _encode(closed), key=batch, partition=number)
