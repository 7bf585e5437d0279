"""chdb, the ClickHouse engine as a library, asked the way ClickHouse's HTTP server is asked.

One process holds one engine on one directory. Every statement gets a connection of its own (a tenth of a
millisecond), so that what it sets (database, settings) ends with it and statements do not wait for each
other. What is acknowledged is in the file system; a killed process loses nothing of it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TZ"] = "UTC"  # the engine's time zone; it reads this when it is loaded

import chdb

from services.process import CannotStart
from services.warehouse.native import empty_block

TRANSPORT = frozenset(
    {
        "buffer_size",
        "cancel_http_readonly_queries_on_client_close",
        "client_protocol_version",
        "compress",
        "database",
        "decompress",
        "default_format",
        "enable_http_compression",
        "http_headers_progress_interval_ms",
        "password",
        "query",
        "query_id",
        "quota_key",
        "role",
        "send_progress_in_http_headers",
        "session_check",
        "session_id",
        "session_timeout",
        "user",
        "wait_end_of_query",
    }
)
"""Parameters of a request that are not settings of the engine."""

_DEFAULTS = {"async_insert": "0"}
"""An insert is acknowledged when its rows are stored, not when they are queued."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_QUOTED = rb"`(?:[^`\\]|\\.)*`|\"(?:[^\"\\]|\\.)*\""
_INSERT = re.compile(
    rb"\s*(?P<target>INSERT\s+INTO\s+(?:TABLE\s+)?(?:" + _QUOTED + rb"|[\w.])+\s*"
    rb"(?:\((?:" + _QUOTED + rb"|[^)`\"])*\))?)(?P<settings>\s*SETTINGS\s+[^\n]*?)?\s*"
    rb"\bFORMAT\s+(?P<format>\w+)[ \t]*;?[ \t]*(?:\r?\n|$)",
    re.IGNORECASE,
)
_FORMAT = re.compile(rb"\bFORMAT\s+(\w+)(?:\s+SETTINGS\s+[^\n]*)?\s*;?\s*$", re.IGNORECASE)
_ASKS = re.compile(rb"[\s(]*(?:SELECT|WITH|SHOW|DESC|DESCRIBE|EXISTS|EXPLAIN|CHECK|VALUES)\b", re.IGNORECASE)
_CODE = re.compile(r"Code: (\d+)\.")


class EngineError(Exception):
    """The engine refused a statement; `code` is ClickHouse's."""

    def __init__(self, message: str) -> None:
        at = message.find("Code: ")
        super().__init__(message[max(at, 0) :])
        found = _CODE.search(message)
        self.code = int(found[1]) if found else 1002


class Statement(NamedTuple):
    """What to run. `body` is SQL, and for an insert perhaps its data after the FORMAT clause."""

    body: bytes
    database: str
    settings: dict[str, str]
    parameters: dict[str, str]
    default_format: str
    read_only: bool


class Answer(NamedTuple):
    body: bytes
    format: str | None
    """None when the statement returns no rows by its nature."""
    summary: dict[str, str]


class Engine:
    """The engine on one directory. Methods block; call them from worker threads."""

    def __init__(self, directory: Path) -> None:
        """Raises CannotStart when another process has the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise CannotStart(f"{directory} is used by another warehouse; stop that one first") from None
        self._spool = directory / "spool"
        shutil.rmtree(self._spool, ignore_errors=True)  # left by a process that was killed
        self._spool.mkdir(parents=True)
        self._path = str(directory / "engine")
        self._open = chdb.connect(self._path)  # keeps the engine alive between statements

    def close(self) -> None:
        self._open.close()
        self._lock.close()

    def run(self, statement: Statement) -> Answer:
        """Run one statement to its end; raises EngineError."""
        connection = chdb.connect(self._path)
        try:
            _prepare(connection, statement)
            insert = _INSERT.match(statement.body)
            if insert is not None:
                return _insert(connection, insert, statement.body[insert.end() :], self._spool)
            return _query(connection, statement)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        finally:
            connection.close()


def _prepare(connection: Any, statement: Statement) -> None:
    if statement.database and statement.database != "default":
        connection.query("USE `" + statement.database.replace("\\", "\\\\").replace("`", "\\`") + "`")
    for name, value in (_DEFAULTS | statement.settings).items():
        if not _NAME.fullmatch(name):
            raise EngineError(f"Code: 115. DB::Exception: Unknown setting {name!r}. (UNKNOWN_SETTING)")
        connection.query(f"SET {name} = '{_quoted(value)}'")
    if statement.read_only:
        connection.query("SET readonly = 2")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _insert(connection: Any, insert: re.Match[bytes], data: bytes, spool: Path) -> Answer:
    """Rows from a file: the other ways in lose some, cutting binary data short or dropping refused rows."""
    with tempfile.NamedTemporaryFile(dir=spool, suffix=".rows") as file:
        file.write(data)
        file.flush()
        sql = b" ".join(
            [
                insert["target"],
                b"FROM INFILE '" + _quoted(file.name).encode() + b"'",
                insert["settings"] or b"",
                b"FORMAT " + insert["format"],
            ]
        )
        done = connection.query(sql, "TabSeparated")
    return Answer(
        b"",
        None,
        {
            "written_rows": str(done.rows_written()),
            "written_bytes": str(done.bytes_written()),
            "elapsed_ns": str(round(done.elapsed() * 1e9)),
        },
    )


def _query(connection: Any, statement: Statement) -> Answer:
    found = _FORMAT.search(statement.body)
    name = found[1].decode() if found else statement.default_format
    result = connection.query(statement.body, name, params=statement.parameters)
    body: bytes = result.bytes() or b""
    asks = found is not None or _ASKS.match(statement.body) is not None
    if not body and asks and name == "Native":
        body = _no_rows(connection, statement, found)
    summary = {
        "read_rows": str(result.rows_read()),
        "read_bytes": str(result.bytes_read()),
        "elapsed_ns": str(round(result.elapsed() * 1e9)),
    }
    return Answer(body, name if asks else None, summary)


def _no_rows(connection: Any, statement: Statement, found: re.Match[bytes] | None) -> bytes:
    """A block with columns and no rows, which the server sends and the library leaves out."""
    query = statement.body[: found.start()] if found else statement.body
    try:
        described = connection.query(
            b"DESCRIBE TABLE (" + query.strip() + b"\n)", "JSONCompactEachRow", params=statement.parameters
        )
    except RuntimeError:  # not a query that can be described, such as SHOW
        return b""
    return empty_block(described.bytes())
