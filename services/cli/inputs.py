"""A look at an input file before it is submitted: its hash, and how many model calls its tools and workflows
may cost."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from services.cli.client import Exit, Trouble
from streams.core.strictjson import NotJson, parse
from streams.core.toolconfig import DEFAULT_REQUESTS, DEFAULT_ROUNDS, MAX_REQUESTS, MAX_ROUNDS

_LINE_BYTES = 16 * 1024 * 1024
"""Longer lines are rejected by the server; reading one whole is not worth the memory."""
_PIECE_BYTES = 256 * 1024
_BOM = b"\xef\xbb\xbf"


class Input(msgspec.Struct, frozen=True):
    """What there is to know of a file: SHA-256 in hex, size in bytes, records (its non-blank lines), records
    with tools and workflows among them, and the most model calls that all of them together can take, not
    counting repeats of calls that failed."""

    sha256: str
    bytes: int
    records: int
    tool_records: int
    workflow_records: int
    most_calls: int


def inspect(path: Path) -> Input:
    """Read the file once. Raises `Trouble` if it is no file that can be read."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise Trouble(f"{path} {what}.", Exit.USAGE)
    look = Look()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                look.take(piece)
    except OSError as fault:
        raise Trouble(f"{path} cannot be read: {fault.strerror}.", Exit.USAGE) from fault
    return look.end()


class Look:
    """Takes a file in pieces, and keeps no more of it than a line."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._line: list[bytes] = []
        """What has come of a line; nothing of one that is too long."""
        self._length = 0
        self._blank = True
        self._bytes = self._records = self._tools = self._workflows = self._calls = 0

    def take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._bytes += len(piece)
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._part(part)
            self._end_line()
        self._part(rest)

    def end(self) -> Input:
        self._end_line()
        return Input(
            self._digest.hexdigest(), self._bytes, self._records, self._tools, self._workflows, self._calls
        )

    def _part(self, part: bytes) -> None:
        self._length += len(part)
        self._blank = self._blank and not part.strip(b" \t\r")
        if self._length < _LINE_BYTES:
            self._line.append(part)
        else:
            self._line.clear()

    def _end_line(self) -> None:
        if not self._blank:
            line = b"".join(self._line)
            kind, calls = _look(line if self._records else line.removeprefix(_BOM))
            self._records += 1
            self._tools += kind == "tool_config"
            self._workflows += kind == "workflow"
            self._calls += calls
        self._line, self._length, self._blank = [], 0, True


def _look(line: bytes) -> tuple[str, int]:
    """What runs beside the record's own call, `tool_config`, `workflow` or nothing, and the most calls of it
    all. What the server rejects costs one at most."""
    if b"openrelay" not in line and b"\\u" not in line:  # it may be spelled in escapes
        return "", 1
    try:
        value: object = parse(line)
    except NotJson:
        return "", 1
    for key in ("body", "openrelay"):
        value = value.get(key) if isinstance(value, dict) else None
    match value:
        case {"tool_config": dict(config)}:
            rounds = _number(config, "max_rounds", DEFAULT_ROUNDS, MAX_ROUNDS)
            return ("", 1) if rounds is None else ("tool_config", rounds + 1)
        case {"workflow": dict(config)}:
            calls = _number(config, "max_requests", DEFAULT_REQUESTS, MAX_REQUESTS)
            return ("", 1) if calls is None else ("workflow", calls)
    return "", 1


def _number(config: dict[str, object], name: str, default: int, most: int) -> int | None:
    """A limit as the server takes it, None when it does not."""
    value = config.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return min(value, most) or default
