"""The file object and its lists, in OpenAI's shape."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.ids import FileId


class File(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a file; size in bytes, times in Unix seconds."""

    id: FileId
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True):
    data: list[File]
    first_id: FileId | None
    last_id: FileId | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeletion(msgspec.Struct, frozen=True):
    id: FileId
    object: Literal["file"] = "file"
    deleted: bool = True


class Presigned(msgspec.Struct, frozen=True):
    file_id: FileId
    put_url: str
    expires_at: int
