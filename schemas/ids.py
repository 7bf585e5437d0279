"""The identifiers, as distinct types, and how each is written.

Ids that are handed to a customer carry 128 bits of entropy, so that they cannot be guessed; ids that
must come out the same when a step is repeated are derived from other ids.
"""

import hashlib
import re
from typing import NewType

BatchId = NewType("BatchId", str)
FileId = NewType("FileId", str)
OrganizationId = NewType("OrganizationId", str)

ENTROPY_BYTES = 16

_FILE_ID = re.compile(r"file-([0-9a-f]{32}|batch_[0-9a-f]{32}-(output|error))")


def batch_id(entropy: bytes) -> BatchId:
    """`batch_` and 32 hex digits, from 16 random bytes."""
    return BatchId("batch_" + entropy.hex())


def file_id(entropy: bytes) -> FileId:
    """`file-` and 32 hex digits, from 16 random bytes."""
    return FileId("file-" + entropy.hex())


def is_file_id(text: str) -> bool:
    """Whether a file of ours, of whatever kind, could have this id."""
    return _FILE_ID.fullmatch(text) is not None


def output_file_id(batch: BatchId) -> FileId:
    return FileId(f"file-{batch}-output")


def error_file_id(batch: BatchId) -> FileId:
    return FileId(f"file-{batch}-error")


def line_id(batch: BatchId, index: int) -> str:
    """Id of one line of a result file: the same however often the line is written."""
    return "batch_req_" + hashlib.blake2b(f"{batch}:{index}".encode(), digest_size=16).hexdigest()
