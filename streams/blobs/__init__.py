"""Where whole files live: uploads, each batch's own input, result files and their segments.

`open_blobs` picks the store named in the settings: a local directory (`file://`) or a bucket
(`s3://`, `gs://`, `az://`). Both keep the same promises, stated by `Blobs` and held to them by one suite.
"""

from streams.blobs.port import BlobMissing, Blobs, Writer, why_failed
from streams.blobs.put_urls import PutUrls
from streams.blobs.stores import open_blobs

__all__ = ["BlobMissing", "Blobs", "PutUrls", "Writer", "open_blobs", "why_failed"]
