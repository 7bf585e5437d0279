"""The batch object never goes back, whatever comes in whichever order, once or more often."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.batches import Batch, Status
from schemas.facts import (
    BatchFact,
    Cancel,
    Cause,
    Ended,
    Enqueued,
    Progress,
    Settled,
    Withdrawn,
)
from schemas.ids import BatchId
from schemas.money import UsageTotals
from streams.core.lifecycle import BatchState, advance, fold, terminal_status, to_api
from tests.support import facts

BATCH = BatchId("batch_x")
TOTAL, REJECTED = 10, 2
CREATED = facts.created(BATCH, total=TOTAL, rejected=REJECTED)
ENQUEUED = Enqueued(batch=BATCH, attempt="a", topic="t", extents={0: [(0, 7)]})
RANK = {Status.VALIDATING: 0, Status.IN_PROGRESS: 1, Status.CANCELLING: 2, Status.FINALIZING: 2}


def settled(cause: Cause) -> Settled:
    return Settled(
        batch=BATCH, completed=6, failed=4, usage=UsageTotals(input=9, cost_nano_usd=9), cause=cause
    )


def progress(upto: int) -> Progress:
    """What settle would have reported at `upto`: counts only grow with it."""
    done = min(upto, TOTAL - REJECTED)
    completed = min(6, done * 6 // 8)
    return Progress(
        batch=BATCH,
        upto=upto,
        completed=completed,
        failed=min(2, done - completed),
        usage=UsageTotals(input=completed, cost_nano_usd=completed),
    )


# The log of one batch: facts in an order that can happen, later ones of a kind repeated by a second writer.
histories = st.builds(
    lambda cancel, cause, twice: [
        CREATED,
        *([Cancel(batch=BATCH)] if cancel == 0 else []),
        ENQUEUED,
        *([ENQUEUED, CREATED] if twice else []),
        *([Cancel(batch=BATCH)] if cancel == 1 else []),
        settled(cause),
        *([Cancel(batch=BATCH)] if cancel == 2 else []),
        *([settled(cause)] if twice else []),
    ],
    st.integers(0, 3),
    st.sampled_from(Cause),
    st.booleans(),
)


def rank(batch: Batch) -> int:
    return RANK.get(Status(batch.status), 9)


@given(histories, st.lists(st.integers(1, 8), max_size=10), st.randoms())
def test_status_and_counts_never_go_back(facts: list[BatchFact], reports: list[int], order: object) -> None:
    state = BatchState()
    for upto in reports[:3]:
        state = advance(state, progress(upto))
    seen: list[Batch] = []
    for at, fact in enumerate(facts):
        state = fold(state, fact, 1_000 * (at + 1))
        for upto in reports:
            seen.append(to_api(state, None))
            state = advance(state, progress(upto))
        seen.append(to_api(state, None))
    ended = Ended(
        batch=BATCH,
        status=terminal_status(state).value,
        output=None,
        error=None,
        created=CREATED,
        created_at_ms=1_000,
        settled=settled(Cause.DONE),
    )
    seen.append(to_api(fold(state, ended, 99_000), None))
    for before, after in itertools.pairwise(seen):
        assert rank(before) <= rank(after)
        for name in ("total", "completed", "failed"):
            assert getattr(before.request_counts, name) <= getattr(after.request_counts, name)
        assert before.usage.cost_nano_usd <= after.usage.cost_nano_usd
        counts = after.request_counts
        assert counts.completed + counts.failed <= counts.total
    last = seen[-1]
    assert Status(last.status).terminal
    assert last.request_counts.completed + last.request_counts.failed == last.request_counts.total == TOTAL
    assert last.created_at == 1


@given(histories)
def test_cancelled_if_and_only_if_asked_before_settled(facts: list[BatchFact]) -> None:
    state = BatchState()
    for fact in facts:
        state = fold(state, fact, 1_000)
    kinds = [type(fact) for fact in facts]
    asked = Cancel in kinds[: kinds.index(Settled)]
    assert (terminal_status(state) is Status.CANCELLED) == asked


@given(st.permutations([CREATED, ENQUEUED, Cancel(batch=BATCH)]), st.permutations([3, 8, 5]))
def test_facts_of_different_writers_may_come_in_any_order(facts: list[BatchFact], reports: list[int]) -> None:
    """Facts that two writers append at the same time; progress is from another topic altogether."""
    state = BatchState()
    for fact, upto in zip(facts, reports, strict=True):
        state = advance(fold(state, fact, 5_000), progress(upto))
    shown = to_api(state, None)
    assert shown.status == "cancelling"
    assert shown.request_counts.total == TOTAL
    assert shown.request_counts.completed == progress(8).completed


def test_every_field_the_contract_names_is_there() -> None:
    shown = msgspec.to_builtins(to_api(fold(BatchState(), CREATED, 1_000), None))
    assert list(shown) == [
        "id", "object", "endpoint", "model", "priority", "input_file_id", "completion_window", "status",
        "created_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
        "cancelling_at", "cancelled_at", "expires_at", "output_file_id", "error_file_id", "request_counts",
        "usage", "errors", "metadata",
    ]  # fmt: skip
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_a_batch_somebody_else_answered_for_cannot_be_withdrawn() -> None:
    gone = fold(fold(BatchState(), CREATED, 1), Withdrawn(batch=BATCH), 2)
    assert not gone.exists
    assert not fold(gone, CREATED, 3).exists, "a creation that comes too late does not bring it back"
    kept = fold(fold(fold(BatchState(), CREATED, 1), CREATED, 2), Withdrawn(batch=BATCH), 3)
    assert kept.exists
