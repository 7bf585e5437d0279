"""Picks the store that the settings name."""

from __future__ import annotations

import json
from urllib.parse import unquote, urlsplit

from schemas.settings import Storage
from streams.blobs.bucket import BucketBlobs
from streams.blobs.local import LocalBlobs
from streams.blobs.port import Blobs

BUCKETS = frozenset({"s3", "gs", "az"})
CUT_OFF_KEPT_DAYS = 1


def open_blobs(storage: Storage) -> Blobs:
    """Open the store; a local directory is created and cleared of temporary files of dead writers."""
    url = urlsplit(storage.url)
    if url.scheme == "file":
        return LocalBlobs(unquote(url.path))
    if url.scheme in BUCKETS:
        return BucketBlobs(storage)
    raise ValueError(f"storage.url: {url.scheme!r} is none of file, s3, gs, az")


def lifecycle_rule(storage: Storage) -> str | None:
    """The rule, in the provider's JSON, that makes a bucket drop the parts of uploads cut off by a kill.

    The store's client cannot list such parts, so no process of ours can remove them. None where nothing has
    to be done: a directory has none, and Azure drops blocks that were not committed after a week by itself.
    """
    url = urlsplit(storage.url)
    prefix = url.path.strip("/")
    below = f"{prefix}/" if prefix else ""
    match url.scheme:
        case "s3":
            rule: object = {
                "Rules": [
                    {
                        "ID": "parts-of-cut-off-uploads",
                        "Status": "Enabled",
                        "Filter": {"Prefix": below},
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": CUT_OFF_KEPT_DAYS},
                    }
                ]
            }
        case "gs":
            condition = {"age": CUT_OFF_KEPT_DAYS} | ({"matchesPrefix": [below]} if below else {})
            action = {"type": "AbortIncompleteMultipartUpload"}
            rule = {"lifecycle": {"rule": [{"action": action, "condition": condition}]}}
        case _:
            return None
    return json.dumps(rule)
