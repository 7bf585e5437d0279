"""What happens to a record, topic by topic: `requests.*`, `results`, `outputs`, `errors`, `done`, `ledger`.

Bodies are `msgspec.Raw`: bytes we forward and never re-encode. A body too large for a message stays in
storage and travels as a `Ref`.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from schemas.ids import BatchId
from schemas.money import Usage, UsageTotals

INLINE_BODY_BYTES = 256 * 1024
"""Bodies up to this size travel inside the message; larger ones by reference."""

ALL_PARTITIONS = -1
"""A `Closed` for every partition of the batch at once, written by settle when no dispatcher did."""


class Ref(msgspec.Struct, frozen=True):
    """A range of bytes in storage."""

    object: str
    offset: int
    length: int


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A record refused at create. `index` counts non-blank lines from 0, `line` physical ones from 1."""

    index: int
    line: int
    code: str
    message: str
    param: str | None
    custom_id: str | None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted record in `requests.<model>`. Records of a beaten attempt lie outside the extents."""

    batch: BatchId
    index: int
    attempt: str
    custom_id: str
    body: msgspec.Raw | UnsetType = UNSET
    """The body as the customer wrote it, without `openrelay`."""
    ref: Ref | UnsetType = UNSET
    """The record's whole line in the batch's input object, for a body over `INLINE_BODY_BYTES`."""
    sealed: bytes | UnsetType = UNSET
    """The body's `openrelay` object, AES-GCM sealed."""


class Billed(msgspec.Struct, frozen=True):
    """A request of a workflow that succeeded: the step it was part of, its id there, and its usage."""

    step: int
    id: str
    usage: Usage | None
    unmetered: str = ""
    """Why `usage` is None."""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="output"):
    """The model answered 2xx and the answer is good: a line for the output file."""

    batch: BatchId
    index: int
    custom_id: str
    origin: tuple[int, int]
    """Request partition and position there: a dispatcher that starts finds its finished records by it."""
    status_code: int
    request_id: str
    body: msgspec.Raw | UnsetType = UNSET
    ref: Ref | UnsetType = UNSET
    usage: Usage | None = None
    """None: the answer's usage was missing or unusable; delivered, billed nothing."""
    unmetered: str = ""
    """Why `usage` is None."""
    billed: list[Billed] | UnsetType = UNSET
    """Of a workflow: everything it is billed for, instead of `usage`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="error"):
    """The record failed: an HTTP status of the model server with its body, or one of our codes."""

    batch: BatchId
    index: int
    custom_id: str
    origin: tuple[int, int]
    status_code: int | None = None
    request_id: str | None = None
    body: msgspec.Raw | UnsetType = UNSET
    ref: Ref | UnsetType = UNSET
    code: str | None = None
    message: str | None = None
    billed: list[Billed] | UnsetType = UNSET
    """Of a workflow: what it is billed for although it failed."""
    openrelay: msgspec.Raw | UnsetType = UNSET
    """Of a workflow: what its line says beside `error`."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """A workflow record has finished a step; whoever runs the record from here on begins behind it.

    Of several for one step of a record the first holds.
    """

    batch: BatchId
    index: int
    custom_id: str
    origin: tuple[int, int]
    step: int
    """Steps finished: the number of the callback that is due."""
    requests: int
    """Requests run in all steps so far."""
    billed: list[Billed]
    """Everything that is billed in all steps so far."""
    unbilled: list[str] = []
    """Ids of all other requests of these steps: no id is used again, and all count towards max_requests."""
    body: msgspec.Raw | UnsetType = UNSET
    """The results that the callback is due."""
    ref: Ref | UnsetType = UNSET


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="closed"):
    """Nothing more will come from this request partition for this batch."""

    batch: BatchId
    partition: int
    reason: str
    """`done` (no record was accepted), `cancelled` or `expired`."""


Result = Answered | Failed | Step | Closed


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="line"):
    """One line of a result file, in `outputs` or `errors`. With `ref`, its `response.body` is in storage."""

    batch: BatchId
    index: int
    line: msgspec.Raw
    ref: Ref | UnsetType = UNSET


class Remainder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="remainder"):
    """In `errors`: all accepted records of the batch without a verdict, at once.

    `seen` is a bitmap by index (bit i of byte i // 8, lowest bit first) of the records that have one.
    """

    batch: BatchId
    seen: bytes
    code: str
    message: str


ResultLine = Line | Remainder


class DoneSet(msgspec.Struct, frozen=True, kw_only=True):
    """In `done`: how far the dispatcher that owns a request partition got with one batch.

    Positions number the batch's records in this partition from 0, along its extents.
    """

    batch: BatchId
    attempt: str
    topic: str
    partition: int
    finished: bytes
    """Bitmap of positions whose result is acknowledged."""
    started_upto: int
    """No position at or above this was ever started."""
    results_upto: int = 0
    """Offset in `results` below which every result of this lane is in `finished`."""
    crashes: int = 0
    """Restores in a row that found records in flight."""
    probing: int | None = None
    """The position that runs alone, because records near it were in flight at two crashes."""
    clean: bool = False
    """Nothing was in flight when this was written."""
    steps_from: int | None = None
    """Offset in `results` below which there is no step of a workflow that is not finished."""
    attempts: dict[int, int] = {}
    """By position: failed attempts of records that wait for their next one; of very many, the most tried."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """In `ledger`: the arbiter's state of one batch, everything below offset `upto` of `results` applied."""

    batch: BatchId
    upto: int
    seen: bytes
    completed: int
    failed: int
    usage: UsageTotals
    closed: dict[int, str]
    settled: bool
    expired: bool = False
    """A record that was running was stopped at the end of the window."""
    steps: dict[int, int] = {}
    """By index of an open workflow record: the offset of its last accepted step."""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One billed request. `output_offset` is the offset of the accepted result: the first one wins."""

    request_index: int
    entry_id: str
    completed_at_ms: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_input_nano: int
    cost_output_nano: int
    output_offset: int
    unmetered: str = ""
    """Set instead of tokens when the answer's usage could not be read: goes to `usage_rejects`."""


class UsageChunk(msgspec.Struct, frozen=True, kw_only=True):
    """In `usage`: usage of accepted results of one batch."""

    organization: str
    billing_month: int
    """UTC month of the batch's creation, YYYYMM."""
    batch: BatchId
    model: str
    endpoint: str
    tier: str
    api_key_id: str
    price_id: str
    rows: list[UsageRow]
