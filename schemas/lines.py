"""Lines of the JSONL files: what the customer writes and what the customer reads."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class InputLine(msgspec.Struct, frozen=True):
    """A record of an input file that is known to be valid; unknown keys are ignored."""

    custom_id: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True):
    """An HTTP answer of the model server. `body` is its JSON, its text, or null when it was empty."""

    status_code: int
    request_id: str | None
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """Why there is no answer. `param` and `line` only for records rejected at create."""

    code: str
    message: str
    param: str | UnsetType | None = UNSET
    line: int | UnsetType = UNSET


class ResultLine(msgspec.Struct, frozen=True):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None
    openrelay: msgspec.Raw | UnsetType = UNSET
    """Of a workflow that failed: its steps, requests and usage."""
