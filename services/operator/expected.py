"""What a batch's result files must hold, from its own input object and the records rejected at create."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from schemas.facts import Created
from schemas.lines import InputLine
from schemas.records import Rejected
from services.operator.faults import Faults
from streams.blobs.port import BlobMissing, Blobs
from streams.core.validate.lines import Lines

_decode_rejected = msgspec.json.Decoder(Rejected).decode
_decode_input = msgspec.json.Decoder(InputLine).decode

INPUT = "input"


class Expected(msgspec.Struct, frozen=True):
    total: int
    rejected: dict[int, Rejected]
    custom_ids: list[str | None] | None
    """By index; None when the input object is gone, as it is some time after the end of a batch."""


def expected(blobs: Blobs, created: Created, max_record_bytes: int, faults: Faults) -> Expected:
    """Reads the whole input, a piece in memory at a time."""
    rejected = _rejected(blobs, created, faults)
    faults.compare(INPUT, "number of rejected records", len(rejected), created.rejected)
    try:
        custom_ids = [
            _custom_id(index, data, rejected, faults)
            for index, data in _records(blobs, created.input_object, max_record_bytes)
        ]
    except BlobMissing:
        return Expected(created.total, rejected, None)
    faults.compare(INPUT, "number of records", len(custom_ids), created.total)
    return Expected(created.total, rejected, custom_ids)


def _rejected(blobs: Blobs, created: Created, faults: Faults) -> dict[int, Rejected]:
    if created.rejected_object is None:
        return {}
    try:
        lines = blobs.read(created.rejected_object).splitlines()
    except BlobMissing:
        faults.add(INPUT, f"the list of rejected records is gone: {created.rejected_object}")
        return {}
    return {rejected.index: rejected for rejected in map(_decode_rejected, lines)}


def _custom_id(index: int, data: bytes | None, rejected: dict[int, Rejected], faults: Faults) -> str | None:
    if index in rejected:
        return rejected[index].custom_id
    try:
        return _decode_input(data or b"").custom_id
    except msgspec.DecodeError as error:
        faults.add(INPUT, f"was accepted and cannot be read: {error}", index)
        return None


def _records(blobs: Blobs, name: str, max_record_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    lines = Lines(max_record_bytes)
    for chunk in blobs.stream(name):
        for line in lines.feed(chunk):
            yield line.index, line.data
    for line in lines.end():
        yield line.index, line.data
