"""A look at an input file before it is uploaded: its hash, and how many model calls its tools may cost."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from services.cli.client import Exit, Trouble

_DEFAULT_ROUNDS = 8
_MAX_ROUNDS = 16
_LINE_BYTES = 16 * 1024 * 1024
"""Longer lines are rejected by the server; reading one whole is not worth the memory."""


class _ToolConfig(msgspec.Struct):
    max_rounds: int | None = None


class _Extension(msgspec.Struct):
    tool_config: _ToolConfig | None = None


class _Body(msgspec.Struct):
    openrelay: _Extension | None = None


class _Record(msgspec.Struct):
    body: _Body


class Input(msgspec.Struct, frozen=True):
    """What there is to know of a file: SHA-256 in hex, size in bytes, records (its non-blank lines), records
    with tools, and the most model calls that all of them together can take."""

    sha256: str
    bytes: int
    records: int
    tool_records: int
    most_calls: int


def inspect(path: Path) -> Input:
    """Read the file once, a line at a time. Raises `Trouble` if it is no file that can be read."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise Trouble(f"{path} {what}.", Exit.USAGE)
    digest = hashlib.sha256()
    decoder = msgspec.json.Decoder(_Record)
    size = records = tool_records = most_calls = 0
    continued = False
    try:
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES):
                digest.update(line)
                size += len(line)
                whole = line.endswith(b"\n") or len(line) < _LINE_BYTES
                if not continued and line.strip(b" \t\r\n"):
                    records += 1
                    rounds = _rounds(decoder, line) if whole else 0
                    tool_records += rounds > 0
                    most_calls += rounds + 1
                continued = not whole
    except OSError as fault:
        raise Trouble(f"{path} cannot be read: {fault.strerror}.", Exit.USAGE) from fault
    return Input(digest.hexdigest(), size, records, tool_records, most_calls)


def _rounds(decoder: msgspec.json.Decoder[_Record], line: bytes) -> int:
    """Rounds of tools a record may take; 0 for one without tools, or one that the server will reject."""
    if b'"tool_config"' not in line:
        return 0
    try:
        extension = decoder.decode(line).body.openrelay
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    if extension is None or extension.tool_config is None:
        return 0
    return min(max(extension.tool_config.max_rounds or _DEFAULT_ROUNDS, 0), _MAX_ROUNDS)
