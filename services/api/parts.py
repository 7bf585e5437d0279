"""The objects the routes are made of, built once by `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schemas.settings import Settings
from services.api.presign import Signer
from services.api.readmodel import ReadModel
from services.api.threads import StorageThreads
from services.api.uploads import Uploads
from services.api.uses import Uses
from services.api.validation import Validation
from services.api.writing import FactWriter
from streams.blobs import Blobs, PutUrls


@dataclass(frozen=True)
class Parts:
    settings: Settings
    blobs: Blobs
    threads: StorageThreads
    model: ReadModel
    facts: FactWriter
    uploads: Uploads
    uses: Uses
    signer: Signer
    put_urls: PutUrls | None
    """Signs URLs of the bucket itself, where the settings want that."""
    validation: Validation

    @property
    def spool_directory(self) -> Path:
        return Path(self.settings.data_dir) / "spool"
