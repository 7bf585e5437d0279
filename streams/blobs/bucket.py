"""Objects in a bucket: S3, Google Cloud Storage, Azure.

An object is collected in an unnamed local file and sent on `commit`, in parts when it is large; the store
makes it visible whole. Dying before that leaves nothing, or parts that a lifecycle rule of the bucket
removes (`stores.lifecycle_rule`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO

import obstore
from obstore.store import ObjectStore, from_url

from schemas.settings import Storage
from streams.blobs.port import CHUNK_BYTES, BlobMissing

CLIENT_OPTIONS = frozenset({"allow_http", "connect_timeout", "proxy_url", "root_certificate", "timeout"})
"""Options that concern the HTTP connection; all others name the account, region and credentials."""


def open_store(storage: Storage) -> ObjectStore:
    client = {key: value for key, value in storage.options.items() if key in CLIENT_OPTIONS}
    store = {key: value for key, value in storage.options.items() if key not in CLIENT_OPTIONS}
    return from_url(storage.url, config=store or None, client_options=client or None)


class BucketBlobs:
    def __init__(self, storage: Storage) -> None:
        self._store = open_store(storage)

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[BucketWriter]:
        with tempfile.TemporaryFile() as file:
            yield BucketWriter(self._store, name, file)

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._store, name, data)

    def read(self, name: str) -> bytes:
        with _missing(name):
            return bytes(obstore.get(self._store, name).bytes())

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        # A range that begins at the end of the object is an error to the store, not an empty answer.
        length = min(length, self.size(name) - offset)
        if length <= 0:
            return b""
        with _missing(name):
            return bytes(obstore.get_range(self._store, name, start=offset, length=length))

    def stream(
        self, name: str, chunk: int = CHUNK_BYTES, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        size = self.size(name)
        end = size if length is None else min(size, offset + length)
        if offset >= end:
            return iter(())
        with _missing(name):
            answer = obstore.get(self._store, name, options={"range": (offset, end)})
        return (bytes(piece) for piece in answer.stream(min_chunk_size=chunk))

    def size(self, name: str) -> int:
        with _missing(name):
            size: int = obstore.head(self._store, name)["size"]
        return size

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except BlobMissing:
            return False
        return True

    def copy(self, source: str, target: str) -> None:
        with _missing(source):
            obstore.copy(self._store, source, target)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def list(self, prefix: str) -> list[str]:
        # Stores list below whole path segments only.
        directory = prefix.rpartition("/")[0]
        pages = obstore.list(self._store, prefix=directory or None)
        return sorted(entry["path"] for page in pages for entry in page if entry["path"].startswith(prefix))


class BucketWriter:
    def __init__(self, store: ObjectStore, name: str, file: IO[bytes]) -> None:
        self._store = store
        self._name = name
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def commit(self) -> int:
        size = self._file.tell()
        self._file.seek(0)
        obstore.put(self._store, self._name, self._file)
        return size


@contextlib.contextmanager
def _missing(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BlobMissing(name) from None
