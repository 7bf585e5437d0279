"""A look at an input file before it is uploaded: its hash, and how many model calls its tools and workflows
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
    """Read the file once, a line at a time. Raises `Trouble` if it is no file that can be read."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise Trouble(f"{path} {what}.", Exit.USAGE)
    digest = hashlib.sha256()
    size = records = tool_records = workflow_records = most_calls = 0
    continued = False
    try:
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES):
                digest.update(line)
                size += len(line)
                whole = line.endswith(b"\n") or len(line) < _LINE_BYTES
                if not continued and line.strip(b" \t\r\n"):
                    records += 1
                    kind, calls = _look(line.removeprefix(_BOM)) if whole else ("", 1)
                    tool_records += kind == "tool_config"
                    workflow_records += kind == "workflow"
                    most_calls += calls
                continued = not whole
    except OSError as fault:
        raise Trouble(f"{path} cannot be read: {fault.strerror}.", Exit.USAGE) from fault
    return Input(digest.hexdigest(), size, records, tool_records, workflow_records, most_calls)


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
