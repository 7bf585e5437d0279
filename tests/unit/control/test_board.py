"""The board shows what the facts say, in whatever order the two topics are read."""

from __future__ import annotations

import random

import pytest

from schemas.batches import Status
from schemas.facts import Cancel, Withdrawn
from schemas.ids import BatchId
from services.control.board import BUCKET_MS, BUCKETS, LATEST, Board
from tests.support.facts import START_MS, created, ended, enqueued, message, progress, settled


def test_a_batch_from_its_creation_to_its_end() -> None:
    board = Board()
    board.apply([message(created("b1"))])
    [row] = board.open(None)
    assert (row.status, row.total, row.completed, row.failed) == (Status.VALIDATING, 10, 0, 1)
    board.apply([message(enqueued("b1")), message(progress("b1", 4), START_MS + 1_000)])
    [row] = board.open("acme")
    assert (row.status, row.completed, row.failed) == (Status.IN_PROGRESS, 4, 1)
    assert board.open("rival") == []
    board.apply([message(Cancel(batch=BatchId("b1")))])
    assert board.open(None)[0].status is Status.CANCELLING
    board.apply([message(settled("b1"), START_MS + 2_000), message(ended("b1", status="cancelled"))])
    assert board.open(None) == []
    [row] = board.latest(None)
    assert (row.status, row.completed, row.failed) == (Status.CANCELLED, 9, 1)
    assert board.by_status(None)[Status.CANCELLED] == 1
    assert board.by_status("rival")[Status.CANCELLED] == 0
    assert sum(board.verdicts("acme", START_MS + 5_000)) == 9


@pytest.mark.parametrize("seed", range(20))
def test_progress_may_be_read_before_or_after_the_facts(seed: int) -> None:
    facts = [created("b1"), enqueued("b1"), settled("b1"), ended("b1")]
    reports = [progress("b1", done) for done in (2, 5, 9)]
    chance = random.Random(seed)
    board = Board()
    while facts or reports:
        source = facts if not reports or (facts and chance.random() < 0.5) else reports
        board.apply([message(source.pop(0))])  # type: ignore[arg-type, attr-defined]
    assert board.open(None) == []
    assert [row.batch for row in board.latest(None)] == ["b1"]
    assert sum(board.verdicts(None, START_MS)) <= 9


def test_a_withdrawn_batch_never_was() -> None:
    board = Board()
    board.apply([message(created("b1")), message(Withdrawn(batch=BatchId("b1"))), message(progress("b1", 3))])
    assert board.open(None) == board.latest(None) == []
    assert sum(board.by_status(None).values()) == 0


def test_the_last_to_end_is_first_whatever_was_read_first() -> None:
    board = Board()
    for number in random.Random(1).sample(range(LATEST + 50), LATEST + 50):
        batch = f"b{number}"
        board.apply([message(created(batch)), message(ended(batch), START_MS + number)])
    assert [row.batch for row in board.latest(None)][:2] == [f"b{LATEST + 49}", f"b{LATEST + 48}"]
    assert len(board.latest(None)) == LATEST
    assert board.by_status(None)[Status.COMPLETED] == LATEST + 50


def test_verdicts_lie_in_the_bucket_of_their_time() -> None:
    board = Board()
    board.apply([message(created("b1")), message(enqueued("b1"))])
    board.apply([message(progress("b1", 3), START_MS), message(progress("b1", 5), START_MS + BUCKET_MS)])
    counts = board.verdicts(None, START_MS + BUCKET_MS)
    assert counts[-2:] == [3, 2]
    assert len(counts) == BUCKETS
    assert board.verdicts("rival", START_MS) == [0] * BUCKETS
    later = START_MS + BUCKETS * BUCKET_MS + BUCKET_MS
    board.apply([message(progress("b1", 9), later)])
    assert sum(board.verdicts(None, later)) == 4
