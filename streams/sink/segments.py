"""Segments: immutable pieces of a batch's lines, sorted by index.

An entry is index (u32), length (u32) and the Kafka value as it came, little-endian. The name says which
offsets a segment was made from, so writing it again replaces it by the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from schemas.ids import BatchId
from streams.blobs.port import Blobs

_HEADER = struct.Struct("<II")


class Buffer:
    """Lines of one batch from one topic that are not yet in a segment."""

    def __init__(self, first: int, opened_at: float) -> None:
        self.first = first
        self.last = first
        self.opened_at = opened_at
        self.size = 0
        self._entries: list[tuple[int, bytes]] = []

    def add(self, offset: int, index: int, value: bytes) -> None:
        self.last = offset
        self.size += len(value) + _HEADER.size
        self._entries.append((index, value))

    def write(self, blobs: Blobs, batch: BatchId, topic: str, partition: int) -> None:
        self._entries.sort(key=_by_index)
        name = f"{_prefix(batch, topic)}{partition}-{self.first}-{self.last + 1}"
        with blobs.writer(name) as writer:
            for index, value in self._entries:
                writer.write(_HEADER.pack(index, len(value)) + value)
            writer.commit()


def read(blobs: Blobs, name: str) -> Iterator[tuple[int, bytes]]:
    """Index and value of every entry, a chunk in memory at a time."""
    pending = b""
    for chunk in blobs.stream(name):
        pending += chunk
        position = 0
        while position + _HEADER.size <= len(pending):
            index, length = _HEADER.unpack_from(pending, position)
            end = position + _HEADER.size + length
            if end > len(pending):
                break
            yield index, pending[position + _HEADER.size : end]
            position = end
        pending = pending[position:]
    assert not pending, f"{name} is cut short"


def names(blobs: Blobs, batch: BatchId, topic: str) -> list[str]:
    return blobs.list(_prefix(batch, topic))


def remainder_name(batch: BatchId) -> str:
    """Where the batch's remainder lies until its files are made."""
    return f"batches/{batch}/segments/remainder"


def remove(blobs: Blobs, batch: BatchId) -> None:
    """Everything that is of no use once the batch has ended."""
    for prefix in (f"batches/{batch}/segments/", f"batches/{batch}/answers/"):
        for name in blobs.list(prefix):
            blobs.delete(name)


def _prefix(batch: BatchId, topic: str) -> str:
    return f"batches/{batch}/segments/{topic}-"


def _by_index(entry: tuple[int, bytes]) -> int:
    return entry[0]
