"""Picks the store that the settings name."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from schemas.settings import Storage
from streams.blobs.bucket import BucketBlobs
from streams.blobs.local import LocalBlobs
from streams.blobs.port import Blobs

BUCKETS = frozenset({"s3", "gs", "az"})


def open_blobs(storage: Storage) -> Blobs:
    """Open the store; a local directory is created and cleared of temporary files of dead writers."""
    url = urlsplit(storage.url)
    if url.scheme == "file":
        return LocalBlobs(unquote(url.path))
    if url.scheme in BUCKETS:
        return BucketBlobs(storage.url, storage.options)
    raise ValueError(f"storage.url: {url.scheme!r} is none of file, s3, gs, az")
