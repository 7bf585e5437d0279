"""Merging a settled batch's segments into its result files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from schemas import ids, topics
from schemas.facts import Created, Ended, ResultFile
from schemas.ids import FileId
from schemas.lines import LineResponse, ResultLine
from schemas.records import Line, Ref, Rejected, Remainder
from schemas.records import ResultLine as ResultMessage
from streams.blobs.port import Blobs
from streams.core import bitmap, merge
from streams.core.lifecycle import BatchState, terminal_status
from streams.core.merge import Entry
from streams.core.validate.lines import Lines
from streams.sink import segments

_decode_message = msgspec.json.Decoder(ResultMessage).decode
_decode_rejected = msgspec.json.Decoder(Rejected).decode
_decode_line = msgspec.json.Decoder(ResultLine).decode
_encode = msgspec.json.Encoder().encode


class Incomplete(Exception):
    """The lines that are there do not add up to what the batch was settled with."""


def publish(blobs: Blobs, state: BatchState, max_record_bytes: int) -> Ended:
    """Write both files of a settled batch and return the fact that says so.

    Repeating it writes the same bytes under the same names. Raises Incomplete.
    """
    created, settled = state.created, state.settled
    assert created is not None
    assert settled is not None
    batch = created.batch
    output = _write(
        blobs,
        ids.output_file_id(batch),
        f"batches/{batch}/output.jsonl",
        settled.completed,
        lambda: merge.in_input_order(_runs(blobs, batch, topics.OUTPUTS)),
    )
    error = _write(
        blobs,
        ids.error_file_id(batch),
        f"batches/{batch}/error.jsonl",
        settled.failed,
        lambda: merge.in_input_order(
            [
                *_runs(blobs, batch, topics.ERRORS),
                (merge.rejected_line(batch, rejected) for rejected in _rejected(blobs, created)),
                _unfinished(blobs, created, max_record_bytes),
            ]
        ),
    )
    return Ended(
        batch=batch,
        status=terminal_status(state).value,
        output=output,
        error=error,
        created=created,
        created_at_ms=state.created_at_ms,
        settled=settled,
    )


def _write(
    blobs: Blobs, file_id: FileId, name: str, expected: int, entries: Callable[[], Iterator[Entry]]
) -> ResultFile | None:
    digest = hashlib.sha256()
    lines = size = 0
    with blobs.writer(name) as writer:
        for _, line in entries():
            data = line + b"\n"
            digest.update(data)
            writer.write(data)
            lines += 1
            size += len(data)
        if lines != expected:
            raise Incomplete(f"{name}: {lines} lines, settled with {expected}")
        if not lines:
            return None
        writer.commit()
    return ResultFile(file_id=file_id, object=name, bytes=size, lines=lines, sha256=digest.hexdigest())


def _runs(blobs: Blobs, batch: ids.BatchId, topic: str) -> list[Iterator[Entry]]:
    return [_lines(blobs, name) for name in segments.names(blobs, batch, topic)]


def _lines(blobs: Blobs, name: str) -> Iterator[Entry]:
    for index, value in segments.read(blobs, name):
        message = _decode_message(value)
        assert isinstance(message, Line)
        line = bytes(message.line)
        yield index, _with_body(blobs, line, message.ref) if isinstance(message.ref, Ref) else line


def _with_body(blobs: Blobs, line: bytes, ref: Ref) -> bytes:
    """The line with the body that was too large to travel in it."""
    decoded = _decode_line(line)
    assert decoded.response is not None
    body = msgspec.Raw(blobs.read_range(ref.object, ref.offset, ref.length))
    response = LineResponse(decoded.response.status_code, decoded.response.request_id, body)
    return _encode(msgspec.structs.replace(decoded, response=response))


def _rejected(blobs: Blobs, created: Created) -> Iterator[Rejected]:
    if created.rejected_object is not None:
        for line in blobs.read(created.rejected_object).splitlines():
            yield _decode_rejected(line)


def _unfinished(blobs: Blobs, created: Created, max_record_bytes: int) -> Iterator[Entry]:
    """The records of the remainder, from the input: accepted, and without a verdict of their own."""
    name = segments.remainder_name(created.batch)
    if not blobs.exists(name):
        return
    remainder = _decode_message(blobs.read(name))
    assert isinstance(remainder, Remainder)
    rejected = {rejected.index for rejected in _rejected(blobs, created)}
    lines = Lines(max_record_bytes)
    for chunk in _chunks(blobs, created.input_object):
        for line in lines.end() if chunk is None else lines.feed(chunk):
            if line.index in rejected or bitmap.get(remainder.seen, line.index):
                continue
            assert line.data is not None
            yield merge.unfinished_line(
                created.batch,
                line.index,
                line.data,
                remainder.code,
                remainder.message,
            )


def _chunks(blobs: Blobs, name: str) -> Iterator[bytes | None]:
    """The chunks of an object, then None for its end."""
    yield from blobs.stream(name)
    yield None
