"""`openrelay audit`: a proof that a finished batch is right, or where a running one stands.

A finished batch is read anew from what nobody can argue with: its input object, its two files, its facts in
the log, and the view that finance reads. Nothing is taken from the caches of a process, and nothing is
written. Result files may be gone, deleted by their owner or expired: then the facts and the bill are still
compared, and the report says what cannot be any more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from schemas import topics
from schemas.facts import BatchFact, Ended, Progress
from schemas.ids import BatchId
from schemas.settings import Settings
from services.control.lag import partition_lags
from services.operator import bill
from services.operator.expected import expected
from services.operator.faults import Fault, Faults
from services.operator.log import Log
from services.operator.lost_files import why_gone
from services.operator.result_files import ERROR, OUTPUT, Charge, read
from services.operator.whereabouts import Whereabouts, whereabouts
from services.warehouse.client import connect
from streams.blobs.port import Blobs
from streams.blobs.stores import open_blobs
from streams.core.lifecycle import BatchState, advance, fold, terminal_status
from streams.kafka.messages import Message

_decode = msgspec.json.Decoder(BatchFact).decode
_decode_progress = msgspec.json.Decoder(Progress).decode


class NoSuchBatch(Exception):
    """The log has no facts of this batch."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`good`: nothing is wrong, or, for a batch that has not ended, nothing of it is stuck."""

    batch: str
    organization: str
    status: str
    good: bool
    total: int
    rejected: int
    completed: int
    failed: int
    cost_nano_usd: int
    fault_count: int = 0
    faults: list[Fault] = []
    unproven: list[str] = []
    """What can be compared no more, because a result file was deleted or has expired."""
    notes: list[str] = []
    whereabouts: Whereabouts | None = None


def audit(settings: Settings, batch: str) -> Report:
    """Blocks for as long as reading the batch takes. Raises NoSuchBatch, KafkaFailed, ClickHouseError."""
    blobs = open_blobs(settings.storage)
    with Log(settings.kafka) as log:
        partition = topics.partition_of(batch, settings.kafka.partitions)
        state = state_of(BatchId(batch), log.partition(topics.BATCHES, partition))
        if state.ended is not None:
            return prove(settings, blobs, log, state, state.ended)
        found = whereabouts(settings, blobs, log, state, time.time_ns() // 1_000_000)
        state = state_of(BatchId(batch), log.partition(topics.BATCHES, partition))
        for message in log.partition(topics.PROGRESS, partition):
            if message.key == batch and message.value is not None:
                state = advance(state, _decode_progress(message.value))
        if state.ended is not None:  # meanwhile, so that what was looked for has moved
            return prove(settings, blobs, log, state, state.ended)
    return _report(state, good=not found.stuck, whereabouts=found)


def state_of(batch: BatchId, messages: Iterable[Message]) -> BatchState:
    """The fold of a batch's facts; raises NoSuchBatch."""
    state = BatchState()
    for message in messages:
        if message.value is not None and (message.key or "").startswith(f"{batch}:"):
            state = fold(state, _decode(message.value), message.timestamp_ms)
    if not state.exists:
        raise NoSuchBatch(f"there is no batch {batch}" + (": it was withdrawn" if state.withdrawn else ""))
    return state


def prove(settings: Settings, blobs: Blobs, log: Log, state: BatchState, ended: Ended) -> Report:
    """Judge an ended batch. Raises KafkaFailed, ClickHouseError."""
    faults, notes = Faults(), []
    _check_facts(state, ended, faults)
    wanted = expected(blobs, ended.created, settings.limits.max_record_bytes, faults)
    if wanted.custom_ids is None:
        notes.append("the input object is gone, as it is some time after the end: custom_ids not compared")
    found = read(blobs, ended, wanted, faults)
    for place, count in ((OUTPUT, ended.settled.completed), (ERROR, ended.settled.failed)):
        faults.compare(place, "number of lines", found.lines[place], count)
    unproven = []
    for place, file in found.gone.items():
        if (why := why_gone(log, state, file, time.time_ns() // 1_000_000)) is None:
            faults.add(place, f"{file.object} is gone, and {file.file_id} was not deleted nor has it expired")
        else:
            unproven.append(f"the lines of the {place}, which {why} ({file.file_id})")
    charges = None if found.gone else found.charges
    if charges is not None:
        bill.compare_settled(ended, charges, faults)
    _compare_warehouse(settings, log, ended, charges, faults, notes)
    return _report(
        state,
        good=not faults.count,
        fault_count=faults.count,
        faults=faults.kept,
        unproven=unproven,
        notes=notes,
    )


def _check_facts(state: BatchState, ended: Ended, faults: Faults) -> None:
    place, settled = "facts", ended.settled
    faults.compare(place, "settled", settled, state.settled)
    faults.compare(place, "created", ended.created, state.created)
    faults.compare(place, "status", ended.status, terminal_status(state).value)
    faults.compare(place, "completed + failed", settled.completed + settled.failed, ended.created.total)
    for name, result, count in (
        (OUTPUT, ended.output, settled.completed),
        (ERROR, ended.error, settled.failed),
    ):
        faults.compare(name, "existence", result is not None, count > 0)


def _compare_warehouse(
    settings: Settings,
    log: Log,
    ended: Ended,
    charges: dict[int, Charge] | None,
    faults: Faults,
    notes: list[str],
) -> None:
    before = faults.count
    client = connect(settings.clickhouse)
    try:
        bill.compare_warehouse(client, ended, charges, faults)
    finally:
        client.close()
    if faults.count > before:
        behind = sum(row.lag for row in partition_lags(log.admin) if row.group == "meter")
        if behind:
            notes.append(f"the meter is {behind} messages behind: ask again when it has caught up")


def _report(state: BatchState, *, good: bool, **more: object) -> Report:
    created = state.created
    assert created is not None
    return Report(
        batch=created.batch,
        organization=created.organization,
        status=state.status.value,
        good=good,
        total=created.total,
        rejected=created.rejected,
        completed=state.completed,
        failed=state.failed,
        cost_nano_usd=state.usage.cost_nano_usd,
        **more,  # type: ignore[arg-type]
    )
