"""From lines in any order, some of them twice, to a result file in input order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET

from schemas import ids
from schemas.ids import BatchId
from schemas.lines import LineError, ResultLine
from schemas.records import Rejected
from streams.core import bodies
from streams.core.workflow import UNBEGUN

Entry = tuple[int, bytes]
"""Index of the record and its line, without line end."""

_encode = msgspec.json.Encoder().encode
_NO_STEPS = msgspec.Raw(_encode(UNBEGUN))


def in_input_order(sorted_runs: Iterable[Iterator[Entry]]) -> Iterator[Entry]:
    """Merge runs that are each sorted by index; entries with one index are equal, and one of them stays."""
    last = -1
    for index, line in heapq.merge(*sorted_runs, key=_index):
        if index != last:
            last = index
            yield index, line


def rejected_line(batch: BatchId, rejected: Rejected) -> Entry:
    """The error line of a record refused at create."""
    line = ResultLine(
        id=ids.line_id(batch, rejected.index),
        custom_id=rejected.custom_id,
        response=None,
        error=LineError(rejected.code, rejected.message, rejected.param, rejected.line),
    )
    return rejected.index, _encode(line)


def unfinished_line(batch: BatchId, index: int, record: bytes, code: str, message: str) -> Entry:
    """The error line of a record that was never given a verdict of its own; `record` is its input line."""
    custom_id, is_workflow = bodies.heading(record)
    line = ResultLine(
        id=ids.line_id(batch, index),
        custom_id=custom_id,
        response=None,
        error=LineError(code, message),
        openrelay=_NO_STEPS if is_workflow else UNSET,
    )
    return index, _encode(line)


def _index(entry: Entry) -> int:
    return entry[0]
