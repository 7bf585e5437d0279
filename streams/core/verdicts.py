"""The arbiter: what happened to each record, decided once.

`decide` is a function of the arbiter's state of one batch and the next record of the batch's partition of
`results`, in the order of offsets. The first result of a record is its verdict; every later one is waste.
Nothing else is consulted, no clock either, so reading the same records again gives the same verdicts, lines
and usage: whatever was written before a crash is only written again, identically.

    state = start(spec)
    state, effects = decide(spec, state, offset, at_ms, result)

A workflow record also writes down its steps. They change nothing but what is billed should the batch be
closed before the record's verdict: everything in its last accepted step. The ledger names those steps by
their offsets, and the next reader takes them from the log again.

A batch is settled when every accepted record has a verdict, or when every partition that holds records of it
is closed (cancelled, expired, or nothing was accepted); the records left get one remainder. `nudge` says when
settle must append a `closed` itself because no dispatcher will.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from schemas import ids
from schemas.errors import RunCode
from schemas.facts import Cause, Created, Settled
from schemas.lines import LineError, LineResponse, ResultLine
from schemas.money import Usage, UsageTotals
from schemas.records import (
    ALL_PARTITIONS,
    Answered,
    Billed,
    Closed,
    Failed,
    Ledger,
    Line,
    Remainder,
    Result,
    Step,
    UsageRow,
)
from streams.core import bitmap, pricing, workflow
from streams.core.lifecycle import BatchState

_NULL = msgspec.Raw(b"null")


class Spec(NamedTuple):
    """What the arbiter needs to know of a batch; all of it from write-once facts."""

    created: Created
    billing_month: int
    partitions: frozenset[int]
    """Request partitions that hold records of the batch."""

    @property
    def accepted(self) -> int:
        return self.created.total - self.created.rejected


class Accepted(NamedTuple):
    """The last accepted step of a workflow record. `step` is None until the log is read there again."""

    offset: int
    at_ms: int = 0
    step: Step | None = None


class Tally:
    """The arbiter's state of one batch. `decide` changes it in place; `ledger` is its durable form."""

    __slots__ = ("closed", "completed", "expired", "failed", "seen", "settled", "steps", "upto", "usage")

    def __init__(self, spec: Spec) -> None:
        self.seen = bitmap.empty(spec.created.total)
        self.completed = 0
        self.failed = 0
        self.usage = UsageTotals()
        self.closed: dict[int, str] = {}
        self.upto = 0
        self.settled = False
        self.expired = False
        self.steps: dict[int, Accepted] = {}

    @classmethod
    def restore(cls, spec: Spec, ledger: Ledger) -> Tally:
        tally = cls(spec)
        tally.seen[: len(ledger.seen)] = ledger.seen
        tally.completed = ledger.completed
        tally.failed = ledger.failed
        tally.usage = ledger.usage
        tally.closed = dict(ledger.closed)
        tally.upto = ledger.upto
        tally.settled = ledger.settled
        tally.expired = ledger.expired
        tally.steps = {index: Accepted(offset) for index, offset in ledger.steps.items()}
        return tally

    def ledger(self, spec: Spec) -> Ledger:
        return Ledger(
            batch=spec.created.batch,
            upto=self.upto,
            seen=b"" if self.settled else bytes(self.seen),
            completed=self.completed,
            failed=self.failed,
            usage=self.usage,
            closed=self.closed,
            settled=self.settled,
            expired=self.expired,
            steps={index: accepted.offset for index, accepted in self.steps.items()},
        )


class Effects(NamedTuple):
    """What follows from one result, to be written before the ledger."""

    output: Line | None = None
    error: Line | Remainder | None = None
    cut_off: tuple[Line, ...] = ()
    """Error lines of workflow records that had finished steps when the batch was closed."""
    usage: tuple[UsageRow, ...] = ()
    settled: Settled | None = None
    waste: bool = False


WASTE = Effects(waste=True)


def spec_of(state: BatchState, billing_month: int) -> Spec | None:
    """None while the batch's facts do not yet say where its records lie."""
    if state.created is None or state.enqueued is None:
        return None
    return Spec(state.created, billing_month, frozenset(state.enqueued.extents))


def decide(spec: Spec, tally: Tally, offset: int, at_ms: int, result: Result) -> Effects:
    """Apply the result at `offset` of the batch's partition of `results`, appended at `at_ms`."""
    if offset < tally.upto:
        if isinstance(result, Step) and tally.steps.get(result.index) == Accepted(offset):
            tally.steps[result.index] = Accepted(offset, at_ms, result)
        return Effects()
    tally.upto = offset + 1
    if tally.settled:
        return WASTE
    match result:
        case Closed():
            return _close(spec, tally, result)
        case Step():
            return _note(spec, tally, offset, at_ms, result)
        case Answered() | Failed():
            if result.index >= spec.created.total or bitmap.get(tally.seen, result.index):
                return WASTE
            bitmap.set_bit(tally.seen, result.index)
            return _accept(spec, tally, offset, at_ms, result)


def nudge(state: BatchState, now_ms: int, grace_ms: int) -> Closed | None:
    """The `closed` that settle appends when the batch can end and no dispatcher will say so."""
    if not state.open or state.settled is not None or state.created is None:
        return None
    if state.enqueued is not None and not state.enqueued.extents:
        reason = "done" if not state.accepted else "cancelled" if state.cancelled else "expired"
    elif state.enqueued is not None and now_ms >= state.expires_at_ms + grace_ms:
        reason = "expired"
    else:
        return None
    return Closed(batch=state.created.batch, partition=ALL_PARTITIONS, reason=reason)


def _note(spec: Spec, tally: Tally, offset: int, at_ms: int, step: Step) -> Effects:
    if step.index >= spec.created.total or bitmap.get(tally.seen, step.index):
        return WASTE
    known = tally.steps.get(step.index)
    if known is not None:
        assert known.step is not None, "the log was read again from the offset of every step in the ledger"
        if step.step <= known.step.step:
            return WASTE
    tally.steps[step.index] = Accepted(offset, at_ms, step)
    return Effects()


def _accept(spec: Spec, tally: Tally, offset: int, at_ms: int, result: Answered | Failed) -> Effects:
    created = spec.created
    tally.steps.pop(result.index, None)
    usage: tuple[UsageRow, ...] = ()
    if isinstance(result.billed, list):
        usage = _bill_requests(spec, tally, offset, at_ms, result.index, result.billed)
    if isinstance(result, Answered):
        tally.completed += 1
        if result.billed is UNSET:
            usage = (_bill(spec, tally, offset, at_ms, result),)
        effects = Effects(output=_output_line(result), usage=usage)
    else:
        tally.failed += 1
        tally.expired = tally.expired or result.code == RunCode.BATCH_EXPIRED
        effects = Effects(error=_error_line(result), usage=usage)
    if tally.completed + tally.failed == created.total - created.rejected:
        cause = Cause.EXPIRED if tally.expired else Cause.DONE
        effects = effects._replace(settled=_settle(spec, tally, cause))
    return effects


def _bill(spec: Spec, tally: Tally, offset: int, at_ms: int, result: Answered) -> UsageRow:
    if result.usage is not None:
        tally.usage = msgspec.structs.replace(tally.usage, billed_records=tally.usage.billed_records + 1)
    return _meter(spec, tally, offset, at_ms, result.index, "usage", result.usage, result.unmetered)


def _bill_requests(
    spec: Spec, tally: Tally, offset: int, at_ms: int, index: int, billed: list[Billed]
) -> tuple[UsageRow, ...]:
    if any(entry.usage is not None for entry in billed):
        tally.usage = msgspec.structs.replace(tally.usage, billed_records=tally.usage.billed_records + 1)
    return tuple(
        _meter(
            spec,
            tally,
            offset,
            at_ms,
            index,
            f"usage:{entry.step}:{entry.id}",
            entry.usage,
            entry.unmetered,
        )
        for entry in billed
    )


def _meter(
    spec: Spec,
    tally: Tally,
    offset: int,
    at_ms: int,
    index: int,
    entry_id: str,
    usage: Usage | None,
    unmetered: str,
) -> UsageRow:
    """Add one model call to the batch's usage; its row. Without usage it is listed and billed nothing."""
    total = tally.usage
    input_cost = output_cost = 0
    if usage is None:
        tally.usage = msgspec.structs.replace(total, unmetered_requests=total.unmetered_requests + 1)
    else:
        input_cost, output_cost = pricing.cost_parts(usage, spec.created.price)
        tally.usage = UsageTotals(
            input=total.input + usage.input,
            output=total.output + usage.output,
            cached=total.cached + usage.cached,
            reasoning=total.reasoning + usage.reasoning,
            cost_nano_usd=total.cost_nano_usd + input_cost + output_cost,
            unmetered_requests=total.unmetered_requests,
            billed_records=total.billed_records,
        )
    return UsageRow(
        request_index=index,
        entry_id=entry_id,
        completed_at_ms=at_ms,
        input_tokens=usage.input if usage else 0,
        cached_tokens=usage.cached if usage else 0,
        output_tokens=usage.output if usage else 0,
        cost_input_nano=input_cost,
        cost_output_nano=output_cost,
        output_offset=offset,
        unmetered="" if usage else (unmetered or "usage missing"),
    )


def _close(spec: Spec, tally: Tally, closed: Closed) -> Effects:
    partitions = spec.partitions if closed.partition == ALL_PARTITIONS else {closed.partition}
    for partition in sorted(partitions):
        tally.closed.setdefault(partition, closed.reason)
    if not spec.partitions.issubset(tally.closed):
        return Effects()
    reasons = set(tally.closed.values()) if spec.partitions else {closed.reason}
    cause = (
        Cause.CANCELLED if "cancelled" in reasons else Cause.EXPIRED if "expired" in reasons else Cause.DONE
    )
    code, message = _LEFT[cause]
    cut_off, usage = _cut_off(spec, tally, code, message)
    left = spec.accepted - tally.completed - tally.failed
    remainder = None
    if left:
        remainder = Remainder(batch=spec.created.batch, seen=bytes(tally.seen), code=code, message=message)
        tally.failed += left
    return Effects(error=remainder, cut_off=cut_off, usage=usage, settled=_settle(spec, tally, cause))


def _cut_off(
    spec: Spec, tally: Tally, code: str, message: str
) -> tuple[tuple[Line, ...], tuple[UsageRow, ...]]:
    """Workflow records that the batch is closed over: billed for the steps they had finished."""
    lines: list[Line] = []
    rows: list[UsageRow] = []
    for index, (offset, at_ms, step) in sorted(tally.steps.items()):
        assert step is not None, "the log was read again from the offset of every step in the ledger"
        bitmap.set_bit(tally.seen, index)
        tally.failed += 1
        rows += _bill_requests(spec, tally, offset, at_ms, index, step.billed)
        report = workflow.report(step.step, step.requests, step.billed, spec.created.price)
        failed = Failed(
            batch=step.batch,
            index=index,
            custom_id=step.custom_id,
            origin=step.origin,
            code=code,
            message=message,
            openrelay=msgspec.Raw(_encoder.encode(report)),
        )
        lines.append(_error_line(failed))
    tally.steps = {}
    return tuple(lines), tuple(rows)


_LEFT = {
    Cause.CANCELLED: (RunCode.BATCH_CANCELLED, "the batch was cancelled before this request was run"),
    Cause.EXPIRED: (
        RunCode.BATCH_EXPIRED,
        "the batch's completion window ended before this request was finished",
    ),
    Cause.DONE: (RunCode.PROCESSING_FAILED, "the request was never laid out"),
}


def _settle(spec: Spec, tally: Tally, cause: Cause) -> Settled:
    tally.settled = True
    return Settled(
        batch=spec.created.batch,
        completed=tally.completed,
        failed=tally.failed + spec.created.rejected,
        usage=tally.usage,
        cause=cause,
    )


def _output_line(result: Answered) -> Line:
    body = result.body if isinstance(result.body, msgspec.Raw) else _NULL
    return _line(
        result,
        ResultLine(
            id=ids.line_id(result.batch, result.index),
            custom_id=result.custom_id,
            response=LineResponse(result.status_code, result.request_id, body),
            error=None,
        ),
    )


def _error_line(result: Failed) -> Line:
    response = None
    if result.status_code is not None:
        body = result.body if isinstance(result.body, msgspec.Raw) else _NULL
        response = LineResponse(result.status_code, result.request_id, body)
    error = None if result.code is None else LineError(result.code, result.message or "")
    return _line(
        result,
        ResultLine(
            id=ids.line_id(result.batch, result.index),
            custom_id=result.custom_id,
            response=response,
            error=error,
            openrelay=result.openrelay,
        ),
    )


_encoder = msgspec.json.Encoder()


def _line(result: Answered | Failed, line: ResultLine) -> Line:
    return Line(
        batch=result.batch, index=result.index, line=msgspec.Raw(_encoder.encode(line)), ref=result.ref
    )
