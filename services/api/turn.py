"""Who of several processes of one place is at it: the next one's turn comes when that one has ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class Turn:
    """Held through a lock file, which the end of the process gives back, however it ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle: int | None = None

    @property
    def mine(self) -> bool:
        return self._handle is not None

    def take(self) -> bool:
        """Whether it is this process's turn now; does not wait."""
        if self._handle is not None:
            return True
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._handle = handle
            return True
        os.close(handle)
        return False

    def give_back(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
