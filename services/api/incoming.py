"""Request bodies: counted, bounded, spooled."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from starlette.requests import ClientDisconnect, Request

from services.api import refusals
from services.api.refusals import Refusal
from services.api.threads import StorageThreads

SMALL_BODY_BYTES = 64 * 1024
IN_MEMORY_BYTES = 1024 * 1024


class BodyTooSlow(Exception):
    """The body did not arrive at the least rate that is allowed."""


def declared_length(request: Request) -> int | None:
    """Content-Length; None when the body is sent in chunks."""
    text = request.headers.get("content-length")
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def check_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise Refusal(
            415,
            "Send the body without Content-Encoding.",
            code="unsupported_content_encoding",
            param="Content-Encoding",
            headers={"accept-encoding": "identity"},
        )


async def pieces(request: Request, limit: int, refusal: Refusal) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises `refusal` at the first byte over `limit`, or before the first."""
    check_encoding(request)
    if (declared_length(request) or 0) > limit:
        raise refusal
    received = 0
    try:
        async for piece in request.stream():
            received += len(piece)
            if received > limit:
                raise refusal
            if piece:
                yield piece
    except ClientDisconnect:
        raise refusals.invalid("The body ended early.") from None
    except BodyTooSlow:
        raise Refusal(408, "The body arrived too slowly.", headers={"connection": "close"}) from None


async def small_body(request: Request) -> bytes:
    refusal = Refusal(
        413,
        f"The body is larger than {SMALL_BODY_BYTES:,} bytes.",
        code="file_too_large",
        headers={"connection": "close"},
    )
    return b"".join([piece async for piece in pieces(request, SMALL_BODY_BYTES, refusal)])


class Spool:
    """A body that may be large: in memory while small, then in an unnamed file, which no crash leaves behind.

    Once `end` was awaited `small` is the whole of a small one, None for a large one, and `sha256` its hash in
    hex; `descriptor` gives any of them as a file.
    """

    def __init__(self, directory: Path, threads: StorageThreads) -> None:
        self._directory = directory
        self._threads = threads
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self.small: bytes | None = None
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    async def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= IN_MEMORY_BYTES:
            await self._threads.run(self._write)

    async def end(self) -> None:
        """The body is complete."""
        if self._file is not None or self.size > SMALL_BODY_BYTES:
            await self._threads.run(self._write)
        else:
            self.small = b"".join(self._pending)
            self._hash.update(self.small)

    async def descriptor(self) -> int:
        """An open file that holds the whole body; valid until `close`."""
        file = self._file
        if file is None:
            file = await self._threads.run(self._open)
            file.write(self.small or b"")
            file.flush()
        return file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        file = self._file or self._open()
        block = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        self._hash.update(block)
        file.write(block)
        file.flush()

    def _open(self) -> IO[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed by close
        return self._file
