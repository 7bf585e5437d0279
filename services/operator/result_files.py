"""Reading a batch's result files as an auditor: line by line, against what they must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from schemas import ids
from schemas.facts import Created, Ended, ResultFile
from schemas.lines import ResultLine
from schemas.money import Usage
from schemas.workflows import WorkflowReport
from services.operator.expected import Expected
from services.operator.faults import Faults
from streams.blobs.port import BlobMissing, Blobs
from streams.core import answers, pricing

OUTPUT, ERROR = "output file", "error file"

_decode_line = msgspec.json.Decoder(ResultLine).decode


class _Body(msgspec.Struct):
    """What is billed, of an answer or of a workflow's result; the rest may hold numbers of any size."""

    object: Any = None
    usage: Any = None
    openrelay: msgspec.Raw = msgspec.Raw(b"null")


_decode_body = msgspec.json.Decoder(_Body).decode


class Charge(NamedTuple):
    """What one record is billed, as its line says. `rows` is None for a workflow: its line does not say."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    cost_nano_usd: int = 0
    unmetered: int = 0
    rows: int | None = 0


class Found(NamedTuple):
    """What the two files hold together."""

    lines: dict[str, int]
    charges: dict[int, Charge]
    """By index; only records that ran into something billable or unmetered."""
    gone: dict[str, ResultFile]
    """Files whose object is not there: without them, the charges are not all."""


def read(blobs: Blobs, ended: Ended, expected: Expected, faults: Faults) -> Found:
    """Both files: each record in exactly one line of one of them, in order, under its own custom_id."""
    reading = _Reading(ended.created, expected, faults)
    lines = {}
    for place, result in ((OUTPUT, ended.output), (ERROR, ended.error)):
        lines[place] = 0 if result is None else reading.file(blobs, place, result)
    reading.missing()
    return Found(lines, reading.charges, reading.gone)


class _Reading:
    def __init__(self, created: Created, expected: Expected, faults: Faults) -> None:
        self._created = created
        self._expected = expected
        self._faults = faults
        self._index_of = {ids.line_id(created.batch, i): i for i in range(expected.total)}
        self._place_of: dict[int, str] = {}
        self.gone: dict[str, ResultFile] = {}
        self.charges: dict[int, Charge] = {}

    def file(self, blobs: Blobs, place: str, result: ResultFile) -> int:
        """Number of its lines."""
        digest = hashlib.sha256()
        size = lines = 0
        last = -1
        try:
            for line in _lines(blobs, result.object):
                digest.update(line)
                size += len(line)
                lines += 1
                last = self._line(place, lines, line, last)
        except BlobMissing:
            self.gone[place] = result
            return result.lines
        self._faults.compare(place, "size in bytes", size, result.bytes)
        self._faults.compare(place, "number of lines", lines, result.lines)
        self._faults.compare(place, "sha256", digest.hexdigest(), result.sha256)
        return lines

    def missing(self) -> None:
        if self.gone:
            return
        for index in range(self._expected.total):
            if index not in self._place_of:
                self._faults.add("result files", "is in neither file", index)

    def _line(self, place: str, number: int, data: bytes, last: int) -> int:
        """Check a line; the index of its record, or `last` when it has none."""
        try:
            line = _decode_line(data)
        except msgspec.DecodeError as error:
            self._faults.add(place, f"line {number} cannot be read: {error}")
            return last
        index = self._index_of.get(line.id)
        if index is None:
            self._faults.add(place, f"line {number} has id {line.id}, which no record of the batch has")
            return last
        if index in self._place_of:
            self._faults.add(
                place, f"is there again (line {number}), after the {self._place_of[index]}", index
            )
        elif index < last:
            self._faults.add(place, f"comes after record {last}, in line {number}", index)
        self._place_of.setdefault(index, place)
        if self._expected.custom_ids is not None and index < len(self._expected.custom_ids):
            self._faults.compare(place, "custom_id", line.custom_id, self._expected.custom_ids[index], index)
        self._check_kind(place, index, line)
        self._charge(place, index, line)
        return max(index, last)

    def _check_kind(self, place: str, index: int, line: ResultLine) -> None:
        rejected = self._expected.rejected.get(index)
        code = None if line.error is None else line.error.code
        good = line.response is not None and 200 <= line.response.status_code < 300 and line.error is None
        if good != (place == OUTPUT):
            said = f"status {line.response.status_code}" if line.response else f"error {code}"
            self._faults.add(place, f"does not belong there: {said}", index)
        if rejected is not None:
            self._faults.compare(place, "error code", code, rejected.code, index)

    def _charge(self, place: str, index: int, line: ResultLine) -> None:
        try:
            charge = self._charge_of(place, line)
        except msgspec.ValidationError as error:
            self._faults.add(place, f"its report of a workflow cannot be read: {error}", index)
            return
        if charge is not None:
            self.charges[index] = charge

    def _charge_of(self, place: str, line: ResultLine) -> Charge | None:
        """Raises ValidationError for a workflow's report that is none."""
        if place == ERROR:
            # Only a workflow is billed for a record that failed.
            if isinstance(line.openrelay, msgspec.Raw):
                return _workflow(msgspec.json.decode(line.openrelay, type=WorkflowReport))
            return None
        if line.response is None or not bytes(line.response.body).startswith(b"{"):
            return None
        body = _decode_body(line.response.body)
        if body.object == "workflow.result":
            return _workflow(msgspec.json.decode(body.openrelay, type=WorkflowReport))
        usage, _ = answers.usage_of(body.usage)
        return Charge(unmetered=1) if usage is None else self._priced(usage)

    def _priced(self, usage: Usage) -> Charge:
        cost = sum(pricing.cost_parts(usage, self._created.price))
        return Charge(usage.input, usage.cached, usage.output, usage.reasoning, cost, 0, 1)


def _workflow(report: WorkflowReport) -> Charge:
    usage = report.usage
    return Charge(
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
        usage.cost_nano_usd,
        usage.unmetered_requests,
        None,
    )


def _lines(blobs: Blobs, name: str) -> Iterator[bytes]:
    """The lines of an object with their line ends; what follows the last one is a line without."""
    pending = b""
    for chunk in blobs.stream(name):
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if pending:
        yield pending
