"""What goes between us and the callback of a workflow, and what the customer reads of one."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from schemas.batches import BatchUsage


class CallbackRequest(msgspec.Struct, frozen=True):
    """POST to the callback: the results of the step before, none at step 0."""

    custom_id: str
    context: Raw
    step: int
    results: Raw


class ResponsePart(msgspec.Struct, frozen=True):
    status_code: int
    body: Raw


class ErrorPart(msgspec.Struct, frozen=True):
    code: str
    message: str


class RequestResult(msgspec.Struct, frozen=True):
    """What became of one request of a step."""

    id: str
    status: Literal["succeeded", "failed"]
    response: ResponsePart | None
    error: ErrorPart | None


class StepRequest(msgspec.Struct, frozen=True):
    """A request the callback asks for."""

    id: str
    body: Raw


class ContinueAnswer(msgspec.Struct, frozen=True, tag_field="status", tag="continue"):
    requests: list[StepRequest]


class CompletedAnswer(msgspec.Struct, frozen=True, tag_field="status", tag="completed"):
    output: Raw = Raw(b"null")


class WorkflowError(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class FailedAnswer(msgspec.Struct, frozen=True, tag_field="status", tag="failed"):
    error: WorkflowError


CallbackAnswer = ContinueAnswer | CompletedAnswer | FailedAnswer


class WorkflowReport(msgspec.Struct, frozen=True):
    """`openrelay` of a workflow record's line."""

    workflow_steps: int
    workflow_requests: int
    usage: BatchUsage


class WorkflowOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a workflow record's output line."""

    object: Literal["workflow.result"] = "workflow.result"
    model: str
    output: Raw
    openrelay: WorkflowReport
