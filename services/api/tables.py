"""The read model's tables: every fact folded into a local SQLite file.

One writer, the follower's thread, applies messages in transactions that also move the offsets, so that the
file is always the exact image of a prefix of each partition, whatever kills the process. Readers use
connections of their own. The file belongs to one cluster; one that is of another cluster, of another form,
too old to have missed no tombstone or damaged is thrown away and built anew from the topics.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import msgspec

from schemas import topics
from schemas.facts import (
    BatchFact,
    Claim,
    Created,
    Ended,
    Enqueued,
    FileDeleted,
    FileFact,
    FilePut,
    FileReleased,
    FileStored,
    FileUsed,
    KeyFact,
    KeyIssued,
    KeyRevoked,
    Progress,
    ResultFile,
)
from streams.core import deletion
from streams.core.lifecycle import BatchState, advance, fold
from streams.kafka.messages import Message

FORM = "3"
"""Changes whenever the tables or their meaning do."""

MAX_AGE_S = 5 * 24 * 3600
"""Compacted topics keep tombstones for seven days; an image older than this is not brought up to date."""

CLAIMS_KEPT_MS = 25 * 3_600_000

TOPICS = [topics.BATCHES, topics.FILES, topics.KEYS, topics.PROGRESS, topics.CLAIMS]

TopicPartition = tuple[str, int]

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE offsets (topic TEXT, partition INTEGER, next INTEGER NOT NULL, PRIMARY KEY (topic, partition))
  WITHOUT ROWID;
CREATE TABLE batches (
  id TEXT PRIMARY KEY, organization TEXT, created_at_ms INTEGER, alive INTEGER NOT NULL,
  open INTEGER NOT NULL, accepted INTEGER NOT NULL, input_file_id TEXT, input_object TEXT,
  ended_at_ms INTEGER NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX batches_listed ON batches (organization, created_at_ms, id) WHERE alive;
CREATE INDEX batches_open ON batches (organization, input_file_id) WHERE open;
CREATE INDEX batches_ended ON batches (ended_at_ms) WHERE ended_at_ms > 0;
CREATE TABLE files (
  id TEXT PRIMARY KEY, organization TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
  created_at_ms INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL, object TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX files_listed ON files (organization, created_at_ms, id);
CREATE INDEX files_expiring ON files (expires_at_ms);
CREATE TABLE puts (
  file TEXT PRIMARY KEY, organization TEXT NOT NULL, object TEXT NOT NULL, bytes INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE deleted (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE uses (
  file TEXT, attempt TEXT, offset INTEGER NOT NULL, at_ms INTEGER NOT NULL, batch TEXT NOT NULL,
  released INTEGER NOT NULL, PRIMARY KEY (file, attempt)) WITHOUT ROWID;
CREATE TABLE keys (
  key_id TEXT PRIMARY KEY, sha256 TEXT, organization TEXT, role TEXT, revoked INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX keys_by_hash ON keys (sha256);
CREATE TABLE claims (
  scope TEXT, next INTEGER, at_ms INTEGER NOT NULL, claim TEXT NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY (scope, next)) WITHOUT ROWID;
CREATE INDEX claims_by_id ON claims (claim);
CREATE INDEX claims_by_age ON claims (at_ms);
CREATE TABLE swept (object TEXT PRIMARY KEY) WITHOUT ROWID;
"""

_batch_fact = msgspec.json.Decoder(BatchFact)
_file_fact = msgspec.json.Decoder(FileFact)
_key_fact = msgspec.json.Decoder(KeyFact)
_progress = msgspec.json.Decoder(Progress)
_claim = msgspec.json.Decoder(Claim)
_state = msgspec.msgpack.Decoder(BatchState)
_encode = msgspec.msgpack.Encoder().encode


def decode_state(blob: bytes) -> BatchState:
    return _state.decode(blob)


def decode_claim(blob: bytes) -> Claim:
    return _claim.decode(blob)


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


class Tables:
    """The writing side. Not thread-safe: it belongs to the follower."""

    def __init__(self, path: Path, cluster_id: str) -> None:
        self._connection = _opened(path, cluster_id)

    def offsets(self) -> dict[TopicPartition, int]:
        rows = self._connection.execute("SELECT topic, partition, next FROM offsets")
        return {(topic, partition): offset for topic, partition, offset in rows}

    def apply(self, messages: list[Message]) -> None:
        """Fold messages in, with their offsets, in one transaction."""
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            self._apply_all(messages)
            ends = {(each.topic, each.partition): each.offset + 1 for each in messages}
            self._connection.executemany(
                "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?)", [(*key, end) for key, end in ends.items()]
            )
            execute("INSERT OR REPLACE INTO meta VALUES ('applied_at', ?)", (str(time.time()),))
            execute("COMMIT")
        except BaseException:
            execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._connection.close()

    def _apply_all(self, messages: list[Message]) -> None:
        changed: dict[str, BatchState] = {}
        for message in messages:
            if message.value is None:
                continue
            match message.topic:
                case topics.BATCHES:
                    self._batch_fact(_batch_fact.decode(message.value), message.timestamp_ms, changed)
                case topics.PROGRESS:
                    progress = _progress.decode(message.value)
                    changed[progress.batch] = advance(self._state(progress.batch, changed), progress)
                case topics.FILES:
                    self._file_fact(_file_fact.decode(message.value), message)
                case topics.KEYS:
                    self._key_fact(_key_fact.decode(message.value))
                case topics.CLAIMS:
                    self._claim(message.value, message)
        self._connection.executemany(
            "INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_row(batch, state) for batch, state in changed.items()],
        )

    def _state(self, batch: str, changed: dict[str, BatchState]) -> BatchState:
        if batch in changed:
            return changed[batch]
        row = self._connection.execute("SELECT state FROM batches WHERE id = ?", (batch,)).fetchone()
        return BatchState() if row is None else _state.decode(row[0])

    def _batch_fact(self, fact: BatchFact, at_ms: int, changed: dict[str, BatchState]) -> None:
        if isinstance(fact, Enqueued):
            # Where the records lie is of no interest here, and long.
            fact = msgspec.structs.replace(fact, extents={})
        before = self._state(fact.batch, changed)
        after = fold(before, fact, at_ms)
        changed[fact.batch] = after
        if after.exists and after.ended is not None and (before.ended is None or not before.exists):
            assert after.created is not None
            self._result_files(after.created, after.ended, after.ended_at_ms)

    def _result_files(self, created: Created, ended: Ended, at_ms: int) -> None:
        def add(file: ResultFile | None, purpose: str) -> None:
            if file is not None:
                expires = at_ms + created.result_ttl_s * 1000
                self._add_file(
                    file.file_id, created.organization, purpose, file.bytes, at_ms, expires, file.object
                )

        add(ended.output, "batch_output")
        add(ended.error, "batch_error")

    def _file_fact(self, fact: FileFact, message: Message) -> None:
        at_ms, execute = message.timestamp_ms, self._connection.execute
        match fact:
            case FilePut():
                execute(
                    "INSERT OR IGNORE INTO puts VALUES (?, ?, ?, ?)",
                    (fact.file, fact.organization, fact.object, fact.bytes),
                )
            case FileStored():
                expires = at_ms + fact.ttl_s * 1000
                self._add_file(
                    fact.file, fact.organization, fact.purpose, fact.bytes, at_ms, expires, fact.object
                )
            case FileUsed():
                execute(
                    "INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?, ?, 0)",
                    (fact.file, fact.attempt, message.offset, at_ms, fact.batch),
                )
            case FileReleased():
                execute(
                    "UPDATE uses SET released = 1 WHERE file = ? AND attempt = ?", (fact.file, fact.attempt)
                )
            case FileDeleted():
                uses = execute("SELECT offset FROM uses WHERE file = ?", (fact.file,))
                if deletion.holds(fact.seen, message.offset, (offset for (offset,) in uses)):
                    execute("INSERT OR IGNORE INTO deleted VALUES (?)", (fact.file,))

    def _add_file(
        self, file: str, organization: str, purpose: str, size: int, at_ms: int, expires: int, name: str
    ) -> None:
        self._connection.execute(
            "INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file, organization, purpose, size, at_ms, expires, name),
        )

    def _key_fact(self, fact: KeyFact) -> None:
        if isinstance(fact, KeyIssued):
            self._connection.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, 0) ON CONFLICT (key_id) DO UPDATE SET "
                "sha256 = coalesce(sha256, excluded.sha256), role = coalesce(role, excluded.role), "
                "organization = coalesce(organization, excluded.organization)",
                (fact.key_id, fact.sha256, fact.organization, fact.role.value),
            )
        elif isinstance(fact, KeyRevoked):
            self._connection.execute(
                "INSERT INTO keys VALUES (?, NULL, NULL, NULL, 1) "
                "ON CONFLICT (key_id) DO UPDATE SET revoked = 1",
                (fact.key_id,),
            )

    def _claim(self, value: bytes, message: Message) -> None:
        claim = _claim.decode(value)
        self._connection.execute(
            "INSERT OR IGNORE INTO claims VALUES (?, ?, ?, ?, ?)",
            (claim.scope, message.offset, message.timestamp_ms, claim.claim, value),
        )
        self._connection.execute(
            "DELETE FROM claims WHERE at_ms < ?", (message.timestamp_ms - CLAIMS_KEPT_MS,)
        )


def _row(batch: str, state: BatchState) -> tuple[str | int | bytes | None, ...]:
    created = state.created
    return (
        batch,
        created.organization if created else None,
        state.created_at_ms if created else None,
        state.exists,
        state.open,
        state.accepted if created else 0,
        created.input_file_id if created else None,
        created.input_object if created else None,
        state.ended_at_ms,
        _encode(state),
    )


def _opened(path: Path, cluster_id: str) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = connect(path)
        try:
            if _usable(connection, cluster_id):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
    except sqlite3.DatabaseError:
        # Damaged or not a database: as good as none.
        pass
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    connection = connect(path)
    connection.executescript(_TABLES)
    connection.execute("INSERT INTO meta VALUES ('form', ?), ('cluster', ?)", (FORM, cluster_id))
    return connection


def _usable(connection: sqlite3.Connection, cluster_id: str) -> bool:
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        return False
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    return (
        meta.get("form") == FORM
        and meta.get("cluster") == cluster_id
        and float(meta.get("applied_at", 0)) > time.time() - MAX_AGE_S
        and connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    )
