"""What is done to a batch's input before it exists, as plain blocking functions over storage.

They run in processes of their own (see `validation`): a hostile line can keep the interpreter busy for a
second at a time, which no event loop should share.
"""

from __future__ import annotations

import mmap

import msgspec

from schemas.records import Rejected
from schemas.settings import Egress, Limits
from services.api import inline
from streams.blobs import Blobs
from streams.core.validate import Validator

BLOCK_BYTES = 1024 * 1024


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Take a create request (the file passed along) apart."""

    max_records: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The JSON of its fields, and where its records begin and end (None: no array `requests`)."""

    fields: dict[str, bytes]
    items: list[tuple[int, int]] | None


class LayOut(msgspec.Struct, frozen=True, tag="lay_out"):
    """Write the records of a create request (the file passed along) as the lines of an input file."""

    target: str
    endpoint: str
    items: list[tuple[int, int]]


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Judge every record of an input object; the rejected ones go to another, one JSON line each."""

    input_object: str
    rejected_object: str
    endpoint: str
    models: list[str]
    workflows_enabled: bool
    egress: Egress
    limits: Limits


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What came out; the rejected object exists when `rejected` is not 0."""

    total: int
    rejected: int
    model: str | None
    bytes: int = 0
    """Size of the input."""


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The object is there."""


def open_request(job: Open, body: bytes | mmap.mmap) -> Opened:
    """Raises NotJson, TooManyItems."""
    envelope = inline.scan(body, job.max_records)
    return Opened(envelope.fields, envelope.items)


def lay_out(blobs: Blobs, job: LayOut, body: bytes | mmap.mmap) -> Written:
    with blobs.writer(job.target) as writer:
        block: list[bytes] = []
        waiting = 0
        for start, end in job.items:
            block += (inline.line(bytes(body[start:end]), job.endpoint), b"\n")
            waiting += end - start
            if waiting >= BLOCK_BYTES:
                writer.write(b"".join(block))
                block, waiting = [], 0
        writer.write(b"".join(block))
        writer.commit()
    return Written()


def check(blobs: Blobs, job: Check) -> Verdict:
    """Read the input once. Raises BlobMissing, UnsupportedEncoding, TooManyRecords."""
    validator = Validator(
        endpoint=job.endpoint,
        models=frozenset(job.models),
        workflows_enabled=job.workflows_enabled,
        egress=job.egress,
        limits=job.limits,
    )
    encode = msgspec.json.Encoder().encode
    size = 0
    with blobs.writer(job.rejected_object) as writer:
        for piece in blobs.stream(job.input_object):
            size += len(piece)
            for each in validator.feed(piece):
                if isinstance(each, Rejected):
                    writer.write(encode(each) + b"\n")
        for each in validator.end():
            if isinstance(each, Rejected):
                writer.write(encode(each) + b"\n")
        if validator.rejected:
            writer.commit()
    return Verdict(validator.total, validator.rejected, validator.model, size)
