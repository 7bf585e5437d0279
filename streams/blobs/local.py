"""Objects as files below one directory.

Writing goes: temporary file -> fsync -> rename -> fsync of the directory. Dying before the rename leaves a
temporary file, which the next process to open the store removes; dying after it leaves a whole object. A
writer holds a lock on its temporary file, so that a store opened by another process meanwhile tells living
writers from dead ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from streams.blobs.port import CHUNK_BYTES, BlobMissing

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalBlobs:
    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self._temporary = self._root / ".tmp"
        _make_directories(self._temporary)
        self._remove_leftovers()

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[LocalWriter]:
        target = self._path(name)
        path, file = self._temporary_file()
        with file:
            try:
                yield LocalWriter(file, path, target)
            finally:
                path.unlink(missing_ok=True)

    def put(self, name: str, data: bytes) -> None:
        with self.writer(name) as writer:
            writer.write(data)
            writer.commit()

    def read(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with self._open(name) as file:
            return os.pread(file.fileno(), length, offset)

    def stream(
        self, name: str, chunk: int = CHUNK_BYTES, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        return _pieces(self._open(name), chunk, offset, length)

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            raise BlobMissing(name) from None

    def exists(self, name: str) -> bool:
        return self._path(name).exists()

    def copy(self, source: str, target: str) -> None:
        path = self._temporary / secrets.token_hex(16)
        try:
            os.link(self._path(source), path)
        except FileNotFoundError:
            raise BlobMissing(source) from None
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            self._copy_bytes(source, target)
            return
        try:
            _publish(path, self._path(target))
        finally:
            # rename leaves the source in place when both names already are the same file.
            path.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        _sync_directory(path.parent)

    def list(self, prefix: str) -> list[str]:
        directory = self._root / prefix.rpartition("/")[0]
        found = []
        for parent, directories, names in os.walk(directory):
            directories[:] = [each for each in directories if not each.startswith(".")]
            base = Path(parent).relative_to(self._root)
            found += [name for each in names if (name := str(base / each)).startswith(prefix)]
        return sorted(found)

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"not an object name: {name!r}")
        return self._root / name

    def _open(self, name: str) -> BinaryIO:
        try:
            return open(self._path(name), "rb")
        except FileNotFoundError:
            raise BlobMissing(name) from None

    def _copy_bytes(self, source: str, target: str) -> None:
        with self.writer(target) as writer:
            for piece in self.stream(source):
                writer.write(piece)
            writer.commit()

    def _temporary_file(self) -> tuple[Path, BinaryIO]:
        while True:
            path = self._temporary / secrets.token_hex(16)
            file = open(path, "xb")  # noqa: SIM115 - closed by the writer's context
            fcntl.flock(file, fcntl.LOCK_EX)
            # Between creation and lock another process may have taken it for a leftover.
            if path.exists():
                return path, file
            file.close()

    def _remove_leftovers(self) -> None:
        for path in self._temporary.iterdir():
            try:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            except (BlockingIOError, FileNotFoundError):
                continue


class LocalWriter:
    def __init__(self, file: BinaryIO, path: Path, target: Path) -> None:
        self._file = file
        self._path = path
        self._target = target

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def commit(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        _publish(self._path, self._target)
        return self._file.tell()


def _publish(path: Path, target: Path) -> None:
    _make_directories(target.parent)
    os.rename(path, target)
    _sync_directory(target.parent)


def _make_directories(path: Path) -> None:
    """Create the directory and its parents, each of them durable."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync_directory(each.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(file: BinaryIO, chunk: int, offset: int, length: int | None) -> Iterator[bytes]:
    with file:
        file.seek(offset)
        while length is None or length > 0:
            piece = file.read(chunk if length is None else min(chunk, length))
            if not piece:
                return
            if length is not None:
                length -= len(piece)
            yield piece
