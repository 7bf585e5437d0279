"""Result files: downloaded whole, counted, and told about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from schemas.batches import Batch
from services.cli.client import Client, Exit, Refused, Trouble
from services.cli.outcome import SHOWN
from services.cli.output import bytes_bar, say


def tell_errors(client: Client, batch: Batch, *, rejected: bool) -> None:
    """Sum up the error file of a batch that has ended, and name its first records: those that were
    `rejected` at create, too, unless the user has been told of them."""
    if batch.error_file_id is None:
        return
    errors = Errors(rejected=rejected)
    try:
        client.download(batch.error_file_id, errors.take, lambda done, of: None)
    except Refused as refused:
        if refused.status != 404:
            raise
        say(_gone(batch, "error", batch.error_file_id))
    errors.tell()


class Errors:
    """Lines of an error file, gathered as they come, a piece of bytes at a time."""

    def __init__(self, *, rejected: bool = True) -> None:
        self._rejected = rejected
        self._rest = b""
        self._kinds: Counter[str] = Counter()
        self._first: list[str] = []

    def take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)

    def tell(self) -> None:
        for line in self._first:
            say(f"failed: {line}")
        if (total := self._kinds.total()) > len(self._first):
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
            say(f"failed: {total} in all: {kinds}")

    def _line(self, line: bytes) -> None:
        try:
            error = msgspec.json.decode(line, type=_ErrorLine)
        except msgspec.MsgspecError as fault:
            raise Trouble(f"The error file has a line that is no result: {fault}.", Exit.NETWORK) from fault
        kind, message = error.told()
        self._kinds[kind] += 1
        known = error.error is not None and error.error.line is not None and not self._rejected
        if len(self._first) < SHOWN and not known:
            name = error.custom_id if error.custom_id is not None else "a record without custom_id"
            self._first.append(f"{name}: {message} [{kind}]")


class _Error(msgspec.Struct):
    code: str
    message: str
    line: int | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: Any


class _ErrorLine(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: _Error | None

    def told(self) -> tuple[str, str]:
        """Kind and message of the failure."""
        if self.error is not None:
            where = "" if self.error.line is None else f"line {self.error.line}: "
            return self.error.code, where + self.error.message
        if self.response is None:
            return "unknown", "neither a response nor an error"
        body = self.response.body
        detail = body.get("error") if isinstance(body, dict) else None
        message = detail.get("message") if isinstance(detail, dict) else None
        return f"HTTP {self.response.status_code}", str(message or body or "the answer had no body")


class Saved(msgspec.Struct, frozen=True):
    """A result file on this machine."""

    path: str
    lines: int
    bytes: int


def save(client: Client, file_id: str, path: Path, also: Callable[[bytes], None] | None = None) -> Saved:
    """Download a file to `path`, which holds the whole file or what it held before."""
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        with path.open("wb") as sink:
            return _save(client, file_id, path, sink.write, also)
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as sink:
            saved = _save(client, file_id, path, sink.write, also)
        partial.replace(path)
    except OSError as fault:
        raise Trouble(f"{path} cannot be written: {fault.strerror}.", Exit.USAGE) from fault
    finally:
        partial.unlink(missing_ok=True)
    return saved


def _save(
    client: Client,
    file_id: str,
    path: Path,
    write: Callable[[bytes], object],
    also: Callable[[bytes], None] | None,
) -> Saved:
    lines = 0

    def take(piece: bytes) -> None:
        nonlocal lines
        write(piece)
        lines += piece.count(b"\n")
        if also is not None:
            also(piece)

    with bytes_bar(file_id, 0) as progress:
        size = client.download(file_id, take, progress)
    return Saved(str(path), lines, size)


def save_results(client: Client, batch: Batch, directory: Path) -> dict[str, Saved | None]:
    """Download both result files and compare them with the counts. Tells what failed.

    Raises `Trouble` if the files are not what the batch says, or, after the other one was downloaded, if one
    is gone.
    """
    counts = batch.request_counts
    gone: dict[str, str] = {}
    errors = Errors()
    saved: dict[str, Saved | None] = {"output": None, "error": None}
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise Trouble(f"{directory} cannot be made: {fault.strerror}.", Exit.USAGE) from fault
    for name, file_id, also in (
        ("output", batch.output_file_id, None),
        ("error", batch.error_file_id, errors.take),
    ):
        if file_id is None:
            continue
        try:
            saved[name] = save(client, file_id, directory / f"{batch.id}-{name}.jsonl", also)
        except Refused as refused:
            if refused.status != 404:
                raise
            gone[name] = _gone(batch, name, file_id)
    errors.tell()
    for name, count in (("output", counts.completed), ("error", counts.failed)):
        if name in gone:
            continue
        file = saved[name]
        lines = 0 if file is None else file.lines
        if lines != count:
            raise Trouble(f"The {name} file has {lines} lines where the batch counts {count}.", Exit.NETWORK)
    if gone:
        for file in saved.values():
            if file is not None:
                say(f"wrote {file.lines} lines to {file.path}")
        raise Trouble(" ".join(gone.values()), Exit.USAGE)
    return saved


def _gone(batch: Batch, name: str, file_id: str) -> str:
    return f"The {name} file of {batch.id}, {file_id}, is gone: it was deleted or has expired."
