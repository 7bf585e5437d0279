"""The port to file storage."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from obstore.exceptions import BaseError

CHUNK_BYTES = 1024 * 1024


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class BlobMissing(Exception):
    """No object has this name."""


def is_full(error: OSError) -> bool:
    """Whether writing failed for want of space, which the operator has to make; it may be tried again."""
    return error.errno in _FULL


def why_failed(error: Exception) -> str | None:
    """Why the store cannot do now what it may do later; None for other errors."""
    if isinstance(error, OSError) and is_full(error):
        return f"the storage is full, free some space: {error}"
    if isinstance(error, BaseError):
        return f"the bucket: {str(error).splitlines()[0]}"
    return None


class Writer(Protocol):
    """An object in the making; nothing of it can be seen before `commit`."""

    def write(self, data: bytes) -> None: ...

    def commit(self) -> int:
        """Make the object whole, durable and visible, replacing one of the same name; returns its size."""
        ...


class Blobs(Protocol):
    """Named immutable objects. Every call blocks (use it from threads) and is safe in any thread.

    Names are relative paths of letters, digits and `._-`. Reads of a name that does not exist raise
    `BlobMissing`. An object appears whole and durable or not at all, whenever the process dies. A read under
    way is not disturbed by a replacement or a deletion.
    """

    def writer(self, name: str) -> AbstractContextManager[Writer]:
        """A context in which the object is written; leaving it without `commit` abandons the object."""
        ...

    def put(self, name: str, data: bytes) -> None: ...

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end of the object."""
        ...

    def stream(
        self, name: str, chunk: int = CHUNK_BYTES, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        """The bytes from `offset`, in pieces of about `chunk`. A missing object raises here, not later."""
        ...

    def size(self, name: str) -> int: ...

    def exists(self, name: str) -> bool: ...

    def copy(self, source: str, target: str) -> None:
        """Make `target` equal to `source` without moving the bytes through this process."""
        ...

    def delete(self, name: str) -> None:
        """Remove the object; one that does not exist is fine."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names that start with `prefix`, in order."""
        ...
