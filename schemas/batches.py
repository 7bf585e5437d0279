"""The batch object and the requests about it, in OpenAI's shape."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from schemas.ids import BatchId, FileId


class Status(Enum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LISTED_ERRORS = 100
"""Rejected records shown in a batch object read after create."""


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens and cost so far; cost in nano-USD."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0
    cost_nano_usd: int = 0
    unmetered_requests: int = 0


class BatchError(msgspec.Struct, frozen=True):
    """A record rejected at create. `line` is 1-based and physical."""

    code: str
    message: str
    param: str | None
    line: int
    custom_id: str | None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The batch object. Times are Unix seconds."""

    id: BatchId
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    priority: str
    input_file_id: FileId
    completion_window: str
    status: str
    created_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expires_at: int
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    errors: BatchErrors | None = None
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True):
    data: list[Batch]
    first_id: BatchId | None
    last_id: BatchId | None
    has_more: bool
    object: Literal["list"] = "list"
