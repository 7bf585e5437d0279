"""Intake: lays the accepted records of new batches out in the request topics.

It copies without judging; which lines are accepted was decided at create. What happens, and what is true if
the process dies between two steps:

1. accepted records are appended to the request topic of the model, in turns, smallest batch first
      dies: they lie outside the extents that count; another attempt appends them again
2. all of them are acknowledged, `enqueued` is written with where they lie
      dies before: as 1; two intakes at once: the first `enqueued` holds

`enqueued` is the commit point: before it no record of the batch can run, after it all of them will. A batch
that was cancelled, has expired or has no accepted record gets one without extents.

There are no committed offsets: the work list is every batch created and not enqueued, of the partitions of
`batches` that the group gives to this process.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec
import structlog

from schemas import topics
from schemas.facts import MAX_FACT_BYTES, BatchFact, Enqueued, batch_key
from schemas.ids import BatchId
from schemas.records import INLINE_BODY_BYTES, Ref, Rejected, Request
from schemas.settings import Settings
from streams.blobs.port import Blobs
from streams.core import bodies, extents
from streams.core.lifecycle import BatchState, OpenBatches, ended
from streams.core.sealing import NONCE_BYTES, Sealer
from streams.core.validate.lines import Line, Lines
from streams.crashpoints import passing
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.follow import Follower
from streams.kafka.membership import Membership
from streams.kafka.messages import KafkaFailed, Message
from streams.kafka.producer import Producer

GROUP = "intake"
TURN = 2_000
"""Records of one batch appended before another batch gets its turn."""

RETRY_S = 1.0
CATCH_UP_S = 120.0

log = structlog.get_logger("openrelay.intake")

_decode_fact = msgspec.json.Decoder(BatchFact).decode
_decode_rejected = msgspec.json.Decoder(Rejected).decode
_encode = msgspec.json.Encoder().encode


class _Attempt:
    """One attempt to lay one batch out."""

    def __init__(self, state: BatchState, topic: str, stripes: list[int], lines: Iterator[Line]) -> None:
        assert state.created is not None
        self.batch = state.created.batch
        self.input_object = state.created.input_object
        self.id = uuid.uuid4().hex[:16]
        self.topic = topic
        self.stripes = stripes
        self.lines = lines
        self.left = state.accepted
        self.sent = 0
        self.runs = extents.RunBuilder()


class Intake:
    """Runs in threads of its own from `start` to `stop`."""

    def __init__(self, settings: Settings, blobs: Blobs, instance: str = "intake-1") -> None:
        self._settings = settings
        self._blobs = blobs
        self._instance = instance
        self._sealer = Sealer(settings.secrets)
        self._models = {topics.requests_name(model): model for model in settings.models}
        self._changed = threading.Condition()
        self._batches = OpenBatches(lambda state: state.enqueued is not None or ended(state))
        self._owned: set[int] = set()
        self._attempts: dict[BatchId, _Attempt] = {}
        self._stopping = False
        self._admin = Admin(settings.kafka, f"openrelay-{instance}-admin")
        self._follower = Follower(
            settings.kafka, f"openrelay-{instance}-facts", [topics.BATCHES], self._apply_facts
        )
        self._membership = Membership(
            settings.kafka,
            GROUP,
            instance,
            lambda: [topics.BATCHES],
            on_assigned=self._assigned,
            on_revoked=self._revoked,
            on_lost=self._revoked,
            positions=dict,
            on_failed=self._fail,
        )
        self._worker = threading.Thread(target=self._run, name="intake", daemon=True)
        self.failure: BaseException | None = None
        """What ended intake, if anything did: the process should end too."""
        self.on_failure: Callable[[BaseException], None] | None = None

    def start(self) -> None:
        self._follower.start()
        self._follower.wait_caught_up(CATCH_UP_S)
        self._membership.start()
        self._worker.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._worker.join()
        self._membership.stop()
        self._follower.stop()

    # ---- what there is to do ----

    def _apply_facts(self, messages: list[Message]) -> None:
        with self._changed:
            for message in messages:
                if message.value is None:
                    continue
                self._batches.fold(_decode_fact(message.value), message.timestamp_ms)
            self._changed.notify_all()

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        with self._changed:
            self._owned |= {p for _, p in partitions}
            self._changed.notify_all()

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        with self._changed:
            self._owned -= {p for _, p in partitions}

    def _next(self) -> BatchState | None:
        """The batch with the fewest records left; waits for one, None when stopping."""
        with self._changed:
            while not self._stopping:
                for batch in [b for b in self._attempts if b not in self._batches]:
                    del self._attempts[batch]
                mine = [state for state in self._batches.states.values() if self._is_mine(state)]
                if mine:
                    return min(mine, key=self._left)
                self._changed.wait()
        return None

    def _is_mine(self, state: BatchState) -> bool:
        if state.created is None:
            return False
        return topics.partition_of(state.created.batch, self._settings.kafka.partitions) in self._owned

    def _left(self, state: BatchState) -> int:
        assert state.created is not None
        attempt = self._attempts.get(state.created.batch)
        return state.accepted if attempt is None else attempt.left

    # ---- doing it ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._work()
                except KafkaFailed as error:
                    log.warning("laying out begins anew", error=str(error))
                    self._attempts.clear()
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopping, timeout=RETRY_S)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("intake ended", exc_info=error)
        self.failure = error
        if self.on_failure is not None:
            self.on_failure(error)

    def _work(self) -> None:
        producer = Producer(self._settings.kafka, f"openrelay-{self._instance}-records")
        try:
            while (state := self._next()) is not None:
                self._turn(producer, state)
        finally:
            # What is still under way belongs to attempts that will not be committed.
            producer.close()

    def _turn(self, producer: Producer, state: BatchState) -> None:
        created = state.created
        assert created is not None
        now_ms = time.time_ns() // 1_000_000
        if state.cancelled or now_ms >= state.expires_at_ms or not state.accepted:
            self._commit(
                producer, created.batch, uuid.uuid4().hex[:16], topics.requests_name(created.model or ""), {}
            )
            return
        attempt = self._attempts.get(created.batch) or self._begin(state)
        for _ in range(TURN):
            line = next(attempt.lines, None)
            if line is None:
                break
            self._append(producer, attempt, line)
        else:
            return
        if attempt.left:
            raise RuntimeError(f"{created.batch}: {attempt.left} accepted records are not in its input")
        producer.flush()
        passing("intake.appended")
        self._commit(producer, attempt.batch, attempt.id, attempt.topic, attempt.runs.build())

    def _begin(self, state: BatchState) -> _Attempt:
        created = state.created
        assert created is not None
        assert created.model is not None
        topic = topics.requests_name(created.model)
        count = self._admin.partitions([topic]).get(topic)
        if count is None:
            raise KafkaFailed(f"topic {topic} does not exist; run `openrelay migrate`")
        stripes = extents.stripes(state.accepted, count, random.randrange(count))
        attempt = _Attempt(state, topic, stripes, self._accepted_lines(state))
        self._attempts[created.batch] = attempt
        return attempt

    def _accepted_lines(self, state: BatchState) -> Iterator[Line]:
        created = state.created
        assert created is not None
        rejected: set[int] = set()
        if created.rejected_object is not None:
            for line in self._blobs.read(created.rejected_object).splitlines():
                rejected.add(_decode_rejected(line).index)
        lines = Lines(self._settings.limits.max_record_bytes)

        def every() -> Iterator[Line]:
            for chunk in self._blobs.stream(created.input_object):
                yield from lines.feed(chunk)
            yield from lines.end()

        return (line for line in every() if line.index not in rejected)

    def _append(self, producer: Producer, attempt: _Attempt, line: Line) -> None:
        assert line.data is not None
        custom_id, body, extension = bodies.split_body(line.data)
        fields: dict[str, object] = {}
        if len(body) <= INLINE_BODY_BYTES:
            fields["body"] = msgspec.Raw(body)
        else:
            fields["ref"] = Ref(attempt.input_object, line.offset, len(line.data))
        if extension is not None:
            nonce = os.urandom(NONCE_BYTES)
            fields["sealed"] = self._sealer.seal(extension, attempt.batch, line.index, nonce)
        request = Request(
            batch=attempt.batch,
            index=line.index,
            attempt=attempt.id,
            custom_id=custom_id,
            **fields,  # type: ignore[arg-type]
        )
        producer.send(
            attempt.topic,
            _encode(request),
            key=attempt.batch,
            partition=attempt.stripes[attempt.sent % len(attempt.stripes)],
            on_delivery=lambda delivery: attempt.runs.add(delivery.partition, delivery.offset),
        )
        attempt.sent += 1
        attempt.left -= 1

    def _commit(
        self, producer: Producer, batch: BatchId, attempt: str, topic: str, runs: dict[int, list[extents.Run]]
    ) -> None:
        fact = Enqueued(batch=batch, attempt=attempt, topic=topic, extents=runs)
        value = _encode(fact)
        if len(value) > MAX_FACT_BYTES:
            raise RuntimeError(f"{batch}: its extents take {len(value)} bytes, over {MAX_FACT_BYTES}")
        partition = topics.partition_of(batch, self._settings.kafka.partitions)
        producer.send(topics.BATCHES, value, key=batch_key(fact, attempt), partition=partition)
        producer.flush()
        passing("intake.enqueued")
        with self._changed:
            self._batches.drop(batch)
            self._attempts.pop(batch, None)
        log.info("batch enqueued", batch=batch, runs=sum(map(len, runs.values())), partitions=len(runs))
