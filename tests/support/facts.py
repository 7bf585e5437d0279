"""Facts of a batch, by default of ten records, one of them rejected."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas import topics
from schemas.facts import BatchFact, Cause, Created, Ended, Enqueued, Priority, Progress, Settled
from schemas.ids import BatchId, FileId, OrganizationId
from schemas.money import Price, UsageTotals
from streams.kafka.messages import Message

START_MS = 1_795_000_000_000


def created(batch: str, **fields: Any) -> Created:
    """With these fields instead of its own."""
    usual = Created(
        batch=BatchId(batch),
        organization=OrganizationId("acme"),
        endpoint="/v1/chat/completions",
        priority=Priority.STANDARD,
        input_file_id=FileId("file-1"),
        input_object="x",
        rejected_object=None,
        completion_window="24h",
        window_s=86_400,
        total=10,
        rejected=1,
        model="m",
        price=Price("p", 0, 0, 0, 0),
    )
    return msgspec.structs.replace(usual, **fields)


def enqueued(batch: str) -> Enqueued:
    return Enqueued(batch=BatchId(batch), attempt="a", topic="requests.m", extents={0: [(0, 8)]})


def progress(batch: str, done: int) -> Progress:
    return Progress(batch=BatchId(batch), upto=done, completed=done, failed=0, usage=UsageTotals())


def settled(batch: str) -> Settled:
    return Settled(batch=BatchId(batch), completed=9, failed=1, usage=UsageTotals(), cause=Cause.DONE)


def ended(batch: str, organization: str = "acme", status: str = "completed") -> Ended:
    return Ended(
        batch=BatchId(batch),
        status=status,
        output=None,
        error=None,
        created=created(batch, organization=OrganizationId(organization)),
        created_at_ms=START_MS,
        settled=settled(batch),
    )


def message(fact: BatchFact | Progress, at_ms: int = START_MS) -> Message:
    topic = topics.PROGRESS if isinstance(fact, Progress) else topics.BATCHES
    return Message(topic, 0, 0, at_ms, None, msgspec.json.encode(fact))
