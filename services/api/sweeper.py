"""Removes bytes nobody can reach any more.

 - objects of files that are deleted or expired,
 - the own input of batches that ended a while ago (the stages may still read it just after),
 - uploads that never became a file and announcements of uploads, by the expiry in their name,
 - inputs of attempts to create a batch that never was, or was created by another attempt, by the time in
   their name.

Deleting twice is harmless, so every API process sweeps; each remembers in its tables what it has done.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.api.readmodel import BATCHES_KEPT_MS
from services.api.tables import connect, decode_state
from services.api.uploads import Attempt, parse_arrival, parse_pending, parse_put, ticket_expiry
from streams.blobs import Blobs
from streams.kafka.messages import KafkaFailed

SWEEP_EVERY_S = 60.0
LOOK_AROUND_EVERY = 60
"""Sweeps between two looks for objects that no fact names, which list whole prefixes."""
AT_A_TIME = 500
INPUT_KEPT_MS = 3_600_000
GRACE_MS = 900_000
"""Longer than registering an upload takes and the clocks of two machines differ."""
ATTEMPT_KEPT_MS = 24 * 3_600_000

_ATTEMPT = re.compile(r"batches/(batch_[0-9a-f]+)/(?:input|rejected)-([0-9a-f]{12})[0-9a-f]{16}\.jsonl")

log = logging.getLogger("openrelay.api")


class Sweeper:
    def __init__(
        self,
        blobs: Blobs,
        tables: Path,
        catch_up: Callable[[], None],
        every_s: float = SWEEP_EVERY_S,
    ) -> None:
        """`catch_up` returns when everything said so far is in the tables, and raises when it cannot tell."""
        self._catch_up = catch_up
        self._blobs = blobs
        self._tables = tables
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def sweep(self, connection: sqlite3.Connection, now_ms: int) -> None:
        """Remove what the facts say is over."""
        for name in _over(connection, now_ms):
            self._blobs.delete(name)
            connection.execute("INSERT OR IGNORE INTO swept VALUES (?)", (name,))

    def look_around(self, connection: sqlite3.Connection, now_ms: int) -> None:
        """Remove what no fact names and is too old to be named any more: after catching up, none will."""
        self._catch_up()
        for name in self._blobs.list("pending/"):
            pending = parse_pending(name)
            if pending is not None and _over_since(pending.expires, now_ms):
                if not _known_file(connection, pending.file):
                    self._blobs.delete(f"uploads/{pending.file}")
                self._blobs.delete(name)
        for name in self._blobs.list("puts/"):
            put = parse_put(name)
            if put is not None and _over_since(put.expires, now_ms) and not _is_file(connection, put):
                self._blobs.delete(name)
        for name in self._blobs.list("arrivals/"):
            arrival = parse_arrival(name)
            if arrival is not None and _over_since(arrival.expires, now_ms):
                self._blobs.delete(name)
        for name in self._blobs.list("tickets/"):
            if ticket_expiry(name) * 1000 < now_ms:
                self._blobs.delete(name)
        for name in self._blobs.list("batches/"):
            match = _ATTEMPT.fullmatch(name)
            if (
                match is not None
                and int(match[2], 16) + ATTEMPT_KEPT_MS < now_ms
                and name not in _named_by(connection, match[1], now_ms)
            ):
                self._blobs.delete(name)

    def _run(self) -> None:
        connection = connect(self._tables)
        turn = 0
        while not self._stopping.wait(self._every_s):
            now_ms = time.time_ns() // 1_000_000
            try:
                self.sweep(connection, now_ms)
                if turn % LOOK_AROUND_EVERY == 0:
                    self.look_around(connection, now_ms)
            except KafkaFailed as error:
                log.warning("not looking around: %s", error)
            except Exception:
                # Storage out of reach: nothing depends on sweeping now rather than later.
                log.exception("sweep failed")
            turn += 1
        connection.close()


def _over(connection: sqlite3.Connection, now_ms: int) -> list[str]:
    rows = connection.execute(
        "SELECT object FROM files WHERE (expires_at_ms < ? OR id IN (SELECT id FROM deleted)) "
        "AND object NOT IN (SELECT object FROM swept) "
        "UNION ALL SELECT input_object FROM batches WHERE ended_at_ms BETWEEN 1 AND ? "
        "AND input_object NOT IN (SELECT object FROM swept) LIMIT ?",
        (now_ms, now_ms - INPUT_KEPT_MS, AT_A_TIME),
    )
    return [name for (name,) in rows]


def _over_since(expires: int, now_ms: int) -> bool:
    """Whether an upload has been over for so long that nobody is just making a file of it."""
    return expires * 1000 + GRACE_MS < now_ms


def _is_file(connection: sqlite3.Connection, put: Attempt) -> bool:
    row = connection.execute("SELECT object FROM files WHERE id = ?", (put.file,)).fetchone()
    return row is not None and row[0] == put.name


def _known_file(connection: sqlite3.Connection, file: str) -> bool:
    return connection.execute("SELECT 1 FROM files WHERE id = ?", (file,)).fetchone() is not None


def _named_by(connection: sqlite3.Connection, batch: str, now_ms: int) -> set[str | None]:
    """The objects a batch's facts name and that are still wanted."""
    row = connection.execute("SELECT state FROM batches WHERE id = ?", (batch,)).fetchone()
    state = None if row is None else decode_state(row[0])
    if state is None or state.created is None or not state.exists:
        return set()
    if now_ms - state.created_at_ms > BATCHES_KEPT_MS:
        return set()
    return {state.created.input_object, state.created.rejected_object}
