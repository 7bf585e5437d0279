"""Write-once facts: the state of the system.

Topic `batches`, key `<batch id>:<fact>:<attempt>`, and topic `files`, key `<file id>:<fact>`. Every writer
has its own key, so compaction removes none; of several facts of one kind the one with the lowest offset
holds. Times of record are the broker's append times and so are not fields.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from schemas.ids import BatchId, FileId, OrganizationId
from schemas.money import Price, UsageTotals

MAX_FACT_BYTES = 64_000
"""A fact is read by every process of every role, so it stays small; checked by the writer."""


class Priority(Enum):
    STANDARD = "standard"
    EXPEDITED = "expedited"


class Cause(Enum):
    """Why a batch was settled: every accepted record has a verdict, or no more will be given one."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class ResultFile(msgspec.Struct, frozen=True):
    """A published result file: id, storage object, size in bytes, number of lines, SHA-256 in hex."""

    file_id: FileId
    object: str
    bytes: int
    lines: int
    sha256: str


class Created(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="created"):
    """The batch exists. Written by the API; acknowledged before the customer gets the 200."""

    batch: BatchId
    organization: OrganizationId
    endpoint: str
    priority: Priority
    input_file_id: FileId
    input_object: str
    """The batch's own copy of its input: deleting the upload does not touch it."""
    rejected_object: str | None
    """JSONL of `schemas.records.Rejected`, None when every record was accepted."""
    completion_window: str
    window_s: float
    total: int
    rejected: int
    model: str | None
    """The model every accepted record names; the hint given at create when none was accepted."""
    price: Price
    metadata: dict[str, str] | None = None
    api_key_id: str = ""
    result_ttl_s: int = 2_592_000
    claim: str = ""
    """Id of the claim (topic `claims`) that decided the batch's id."""


class Enqueued(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="enqueued"):
    """The commit point of intake: the accepted records lie in the request topic, in these runs.

    `extents[partition]` is a list of `[first, last]` offsets, both inclusive, ascending.
    """

    batch: BatchId
    attempt: str
    topic: str
    extents: dict[int, list[tuple[int, int]]]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="cancel"):
    """The customer asked to stop. The batch ends `cancelled` if and only if this lies before `settled`."""

    batch: BatchId


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="withdrawn"):
    """The create was answered 503 because its acknowledgement stayed uncertain: the batch never was."""

    batch: BatchId


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="settled"):
    """Every record has its verdict. Counts include the rejected records."""

    batch: BatchId
    completed: int
    failed: int
    usage: UsageTotals
    cause: Cause


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="ended"):
    """The result files are in place; written by the sink as the last fact of a batch.

    It repeats what the batch was created and settled with, so that the meter needs no other fact.
    """

    batch: BatchId
    status: str
    output: ResultFile | None
    error: ResultFile | None
    created: Created
    created_at_ms: int
    settled: Settled


BatchFact = Created | Enqueued | Cancel | Withdrawn | Settled | Ended


class FileStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="stored"):
    """An uploaded file is complete and checked. `seconds` of life count from the fact's append time."""

    file: FileId
    organization: OrganizationId
    object: str
    bytes: int
    purpose: str = "batch"
    ttl_s: int = 2_592_000


class FilePut(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="put"):
    """Somebody has sent the bytes a presigned URL was for; of several the first is the URL's one use."""

    file: FileId
    organization: OrganizationId
    object: str
    bytes: int


class FileUsed(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="used"):
    """A create that reads the file as its input is under way; `attempt` is its own."""

    file: FileId
    batch: BatchId
    attempt: str


class FileReleased(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="released"):
    """That create came to nothing."""

    file: FileId
    attempt: str


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="deleted"):
    """The file is gone, unless it was used after its author had looked; see `streams.core.deletion`."""

    file: FileId
    organization: OrganizationId
    seen: int | None = None
    """Offset of `files` below which the author knew every use; None: it is gone whatever was used."""


FileFact = FilePut | FileStored | FileUsed | FileReleased | FileDeleted


class KeyRole(Enum):
    ORGANIZATION = "organization"
    FINANCE = "finance"
    OPERATOR = "operator"


class KeyIssued(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="issued"):
    """An API key, known by the SHA-256 of its text only."""

    key_id: str
    sha256: str
    organization: OrganizationId
    role: KeyRole
    name: str = ""
    hint: str = ""
    """First characters of the key, for people to recognize it by."""


class KeyRevoked(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="revoked"):
    key_id: str


class KeyUsed(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag="used"):
    """The key was good for a request about when this was appended; said now and then, the last one holds."""

    key_id: str


KeyFact = KeyIssued | KeyRevoked | KeyUsed


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """First live claim for an organization's idempotency key (or body hash) decides the batch's id."""

    claim: str
    scope: str
    """`key:<organization>:<SHA-256 of the Idempotency-Key>` or `body:<organization>:<hash>`."""
    body_sha256: str
    batch: BatchId
    input_file_id: FileId


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a running batch; of several the one with the greatest `upto` holds."""

    batch: BatchId
    upto: int
    completed: int
    failed: int
    usage: UsageTotals


def batch_key(fact: BatchFact, attempt: str) -> str:
    """Kafka key of a batch fact: own to its writer, so that compaction keeps every writer's."""
    return f"{fact.batch}:{fact.__struct_config__.tag}:{attempt}"
