"""Why a result file whose object is gone is gone: its owner may delete it, and it expires."""

from __future__ import annotations

import msgspec

from schemas import topics
from schemas.facts import FileDeleted, FileFact, FileUsed, ResultFile
from services.operator.log import Log
from streams.core import deletion
from streams.core.lifecycle import BatchState

_decode = msgspec.json.Decoder(FileFact).decode


def why_gone(log: Log, state: BatchState, file: ResultFile, now_ms: int) -> str | None:
    """`was deleted` or `has expired`; None when its object should be there. Raises KafkaFailed."""
    assert state.created is not None
    uses: list[int] = []
    for message in log.partition(topics.FILES, 0):
        if message.value is None or not (message.key or "").startswith(f"{file.file_id}:"):
            continue
        match _decode(message.value):
            case FileUsed():
                uses.append(message.offset)
            case FileDeleted(seen=seen) if deletion.holds(seen, message.offset, uses):
                return "was deleted"
    if state.ended_at_ms + state.created.result_ttl_s * 1000 <= now_ms:
        return "has expired"
    return None
