"""The batch object as a pure fold over its facts.

Facts of one batch arrive in the order of their offsets; of each kind the first one holds. `progress` comes
from another topic, in no order relative to the facts, and only ever moves counts forward. So any reader
that has read as far as another shows the same object, and no later read shows less.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from schemas.batches import Batch, BatchErrors, BatchUsage, InputDetails, OutputDetails, RequestCounts, Status
from schemas.facts import (
    BatchFact,
    Cancel,
    Cause,
    Created,
    Ended,
    Enqueued,
    Progress,
    Settled,
    Withdrawn,
)
from schemas.ids import BatchId
from schemas.money import UsageTotals


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a batch; times are the broker's, Unix milliseconds."""

    created: Created | None = None
    created_at_ms: int = 0
    enqueued: Enqueued | None = None
    enqueued_at_ms: int = 0
    cancel_at_ms: int | None = None
    settled: Settled | None = None
    settled_at_ms: int = 0
    ended: Ended | None = None
    ended_at_ms: int = 0
    withdrawn: bool = False
    adopted: bool = False
    """A second writer created the batch before anybody withdrew it, and may have answered for it."""
    upto: int = -1
    completed: int = 0
    failed: int = 0
    usage: UsageTotals = UsageTotals()

    @property
    def exists(self) -> bool:
        return self.created is not None and not self.withdrawn

    @property
    def open(self) -> bool:
        """Created, not withdrawn, not ended."""
        return self.exists and self.ended is None

    @property
    def cancelled(self) -> bool:
        return self.cancel_at_ms is not None

    @property
    def expires_at_ms(self) -> int:
        assert self.created is not None
        return self.created_at_ms + round(self.created.window_s * 1000)

    @property
    def accepted(self) -> int:
        assert self.created is not None
        return self.created.total - self.created.rejected

    @property
    def status(self) -> Status:
        if self.ended is not None:
            return Status(self.ended.status)
        if self.cancelled:
            return Status.CANCELLING
        if self.settled is not None:
            return Status.FINALIZING
        return Status.IN_PROGRESS if self.enqueued is not None else Status.VALIDATING


def fold(state: BatchState, fact: BatchFact, at_ms: int) -> BatchState:
    """The state after one more fact, appended to the log at `at_ms`."""
    replace = msgspec.structs.replace
    match fact:
        case Created():
            if state.created is None:
                return replace(state, created=fact, created_at_ms=at_ms)
            return replace(state, adopted=True)
        case Enqueued():
            if state.enqueued is None:
                return replace(state, enqueued=fact, enqueued_at_ms=at_ms)
        case Cancel():
            if state.cancel_at_ms is None and state.settled is None:
                return replace(state, cancel_at_ms=at_ms)
        case Settled():
            if state.settled is None:
                return replace(
                    state,
                    settled=fact,
                    settled_at_ms=at_ms,
                    completed=fact.completed,
                    failed=fact.failed,
                    usage=fact.usage,
                )
        case Ended():
            if state.ended is None:
                return replace(state, ended=fact, ended_at_ms=at_ms)
        case Withdrawn():
            return replace(state, withdrawn=not state.adopted)
    return state


class OpenBatches:
    """The batches a process cares about, folded as their facts come by.

    A batch that is over is remembered by its id alone: what is still said of it, by a writer that woke up
    late, does not bring it back.
    """

    def __init__(self, over: Callable[[BatchState], bool]) -> None:
        self.states: dict[BatchId, BatchState] = {}
        self._over = over
        self._gone: set[BatchId] = set()

    def __contains__(self, batch: BatchId) -> bool:
        return batch in self.states

    def is_gone(self, batch: BatchId) -> bool:
        return batch in self._gone

    def fold(self, fact: BatchFact, at_ms: int) -> BatchState | None:
        """The batch's state after one more fact; None when it was over before."""
        if fact.batch in self._gone:
            return None
        state = fold(self.states.get(fact.batch, BatchState()), fact, at_ms)
        if self._over(state):
            self.drop(fact.batch)
        else:
            self.states[fact.batch] = state
        return state

    def drop(self, batch: BatchId) -> None:
        """It is over, by this process's own knowledge."""
        self.states.pop(batch, None)
        self._gone.add(batch)


def ended(state: BatchState) -> bool:
    """Nothing will change for the batch any more."""
    return state.ended is not None or state.withdrawn


def advance(state: BatchState, progress: Progress) -> BatchState:
    """The state after a progress report; an older report, or one of a settled batch, changes nothing."""
    if state.settled is not None or progress.upto <= state.upto:
        return state
    return msgspec.structs.replace(
        state,
        upto=progress.upto,
        completed=progress.completed,
        failed=progress.failed,
        usage=progress.usage,
    )


def terminal_status(state: BatchState) -> Status:
    """What a settled batch ends as."""
    assert state.created is not None
    assert state.settled is not None
    if state.cancelled:
        return Status.CANCELLED
    if state.settled.cause is Cause.EXPIRED:
        return Status.EXPIRED
    return Status.FAILED if state.accepted == 0 else Status.COMPLETED


def to_api(state: BatchState, errors: BatchErrors | None) -> Batch:
    """The object a customer reads. `errors` are the rejected records to show."""
    created = state.created
    assert created is not None
    status = state.status
    ended_s = state.ended_at_ms // 1000

    def when(terminal: Status) -> int | None:
        return ended_s if status is terminal else None

    ended = state.ended
    return Batch(
        id=created.batch,
        endpoint=created.endpoint,
        model=created.model,
        priority=created.priority.value,
        input_file_id=created.input_file_id,
        completion_window=created.completion_window,
        status=status.value,
        created_at=state.created_at_ms // 1000,
        in_progress_at=_seconds(state.enqueued_at_ms) if state.enqueued else None,
        finalizing_at=_seconds(state.settled_at_ms) if state.settled and not state.cancelled else None,
        completed_at=when(Status.COMPLETED),
        failed_at=when(Status.FAILED),
        expired_at=when(Status.EXPIRED),
        cancelling_at=_seconds(state.cancel_at_ms) if state.cancel_at_ms is not None else None,
        cancelled_at=when(Status.CANCELLED),
        expires_at=state.expires_at_ms // 1000,
        output_file_id=ended.output.file_id if ended and ended.output else None,
        error_file_id=ended.error.file_id if ended and ended.error else None,
        request_counts=_counts(state, created),
        usage=_usage(state.usage),
        errors=errors,
        metadata=created.metadata,
    )


def _seconds(at_ms: int) -> int:
    return at_ms // 1000


def _counts(state: BatchState, created: Created) -> RequestCounts:
    if state.settled is not None:
        return RequestCounts(created.total, state.completed, state.failed)
    if state.enqueued is None:
        return RequestCounts()
    return RequestCounts(created.total, state.completed, state.failed + created.rejected)


def _usage(totals: UsageTotals) -> BatchUsage:
    return BatchUsage(
        input_tokens=totals.input,
        input_tokens_details=InputDetails(totals.cached),
        output_tokens=totals.output,
        output_tokens_details=OutputDetails(totals.reasoning),
        total_tokens=totals.input + totals.output,
        cost_nano_usd=totals.cost_nano_usd,
        unmetered_requests=totals.unmetered_requests,
    )
