"""Where the records of a batch that has not ended are, and which of them are stuck.

    created ─► laid out ─► finished by the dispatcher ─► verdict ─► line in a segment

A record that one stage counts and the next one lacks is lost. Whether a record that was started still runs
only its dispatcher knows, so it counts as in flight for as long as one call may take and `stuck_after_s`
beyond; one that was not started is stuck when nothing of its model has moved for `stuck_after_s`. Records
that were running when their dispatcher crashed more than once run one at a time: they wait when their
partition is quiet for `stuck_after_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from schemas.settings import Limits, Settings
from services.operator.log import Log
from services.operator.traces import Traces
from streams.blobs.port import Blobs
from streams.core import bitmap
from streams.core.extents import Positions
from streams.core.lifecycle import BatchState
from streams.core.standstill import CAREFUL_AFTER

NAMED = 10
"""Records of one kind of trouble that are named one by one."""


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
    traces = Traces(settings, blobs, log, state)
    lanes = _lanes(state, traces, now_ms)
    ledger, enqueued = traces.ledger, state.enqueued
    return Whereabouts(
        accepted=state.accepted,
        laid_out=None if enqueued is None else sum(lane.records for lane in lanes),
        topic=None if enqueued is None else enqueued.topic,
        lanes=lanes,
        finished=sum(lane.finished for lane in lanes),
        verdicts=0 if ledger is None else ledger.completed + ledger.failed,
        results_waiting=len(traces.undecided),
        output_lines=len(traces.output_lines),
        error_lines=len(traces.error_lines),
        settled=state.settled is not None,
        stuck=list(_stuck(settings.limits, state, traces, lanes, now_ms)),
    )


def _lanes(state: BatchState, traces: Traces, now_ms: int) -> list[LaneState]:
    lanes = []
    for partition, runs in sorted(state.enqueued.extents.items()) if state.enqueued is not None else ():
        records = Positions(runs).count
        done = traces.done.get(partition)
        if done is None:
            idle_s = _since_s(state.enqueued_at_ms, now_ms)
            lanes.append(LaneState(partition=partition, records=records, idle_s=idle_s))
            continue
        lanes.append(
            LaneState(
                partition=partition,
                records=records,
                started_upto=done.started_upto,
                finished=bitmap.count(done.finished),
                crashes=done.crashes,
                probing=done.probing,
                idle_s=_since_s(traces.done_at_ms[partition], now_ms),
            )
        )
    return lanes


def _stuck(
    limits: Limits, state: BatchState, traces: Traces, lanes: list[LaneState], now_ms: int
) -> Iterator[Stuck]:
    bound_s = limits.stuck_after_s
    if state.settled is not None:
        waited_s = _since_s(state.settled_at_ms, now_ms)
        if waited_s > bound_s:
            said = f"settled {waited_s:.0f} s ago, and its files are not made: does the sink run?"
            yield Stuck(said=said, count=state.accepted)
        return
    if traces.ledger is not None and traces.ledger.settled:
        return  # since the facts were read
    waited_s = _since_s(state.created_at_ms, now_ms)
    if state.enqueued is None and waited_s > bound_s:
        said = f"created {waited_s:.0f} s ago and not laid out in the request topic: does intake run?"
        yield _named(said, range(state.accepted), state.accepted)
    yield from _lost(traces, sum(lane.finished for lane in lanes))
    quiet_s = _since_s(traces.model_moved_at_ms, now_ms)
    for lane in lanes:
        yield from _idle(limits, traces, lane, quiet_s)


def _lost(traces: Traces, finished: int) -> Iterator[Stuck]:
    """Records that one stage counts and the next one lacks."""
    seen = set() if traces.ledger is None else set(_set_bits(traces.ledger.seen))
    lines = traces.output_lines | traces.error_lines
    without_line = sorted(seen - lines)
    if without_line:
        said = "has a verdict and no line in any segment or topic"
        yield _named(said, without_line, len(without_line))
    known = seen | traces.undecided
    if finished > len(known):
        without_result = [
            index
            for partition, done in traces.done.items()
            for position, index in enumerate(traces.all_indices(partition))
            if bitmap.get(done.finished, position) and index not in known
        ]
        said = "was finished by the dispatcher and has no result in the log"
        yield _named(said, without_result, len(without_result))


def _idle(limits: Limits, traces: Traces, lane: LaneState, quiet_s: float) -> Iterator[Stuck]:
    """Records of a lane in which nothing happens, as nothing of the model has for `quiet_s`."""
    done = traces.done.get(lane.partition)
    running = list(bitmap.unset(b"" if done is None else done.finished, lane.started_upto))
    if running and lane.crashes >= CAREFUL_AFTER and lane.idle_s > limits.stuck_after_s:
        said = (
            f"in partition {lane.partition} the dispatcher crashed {lane.crashes} times in a row while it "
            f"had them: they run one at a time, and none has ended for {lane.idle_s:.0f} s"
        )
        yield _named(said, traces.indices(lane.partition, running), len(running))
    elif running and lane.idle_s > limits.stuck_after_s + limits.request_time_limit_s:
        said = f"started in partition {lane.partition}, and no result for {lane.idle_s:.0f} s"
        yield _named(said, traces.indices(lane.partition, running), len(running))
    unstarted = range(lane.started_upto, lane.records)
    idle_s = min(lane.idle_s, quiet_s)
    if unstarted and idle_s > limits.stuck_after_s:
        said = (
            f"not started in partition {lane.partition}, and nothing of the model moved for {idle_s:.0f} s: "
            "no dispatcher, no server in service?"
        )
        yield _named(said, traces.indices(lane.partition, unstarted), len(unstarted))


def _named(said: str, indices: Iterable[int], count: int) -> Stuck:
    return Stuck(said=said, count=count, indices=list(islice(indices, NAMED)))


def _set_bits(bits: bytes) -> Iterator[int]:
    return (bit for bit in range(len(bits) * 8) if bitmap.get(bits, bit))


def _since_s(at_ms: int, now_ms: int) -> float:
    return max(0.0, (now_ms - at_ms) / 1000)
