"""Whether the stack that wrote a `connection.json` still runs: one that was killed leaves the file behind."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class _Processes(msgspec.Struct, frozen=True):
    pids: dict[str, int] = {}


def runs(directory: Path) -> bool:
    """Whether a stack runs in this data directory, as far as its file and its processes tell."""
    return any(map(_is_alive, _pids(directory)))


def was_killed(directory: Path) -> bool:
    """Whether the file is there and none of the processes it names."""
    return (directory / "connection.json").exists() and not runs(directory)


def _pids(directory: Path) -> list[int]:
    try:
        file = (directory / "connection.json").read_bytes()
        return list(msgspec.json.decode(file, type=_Processes).pids.values())
    except (OSError, msgspec.MsgspecError):
        return []


def _is_alive(pid: int) -> bool:
    """One that has ended and that nobody has waited for is dead; one of another user is none of ours."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return True  # no such file system here
    return state not in ([b"Z"], [b"X"])
