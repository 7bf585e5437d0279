"""What the API knows: the facts of the cluster as of now.

A follower keeps the tables up to date; `barrier` makes sure that everything acknowledged before it was
called is in them, so that an answer never shows less than an earlier answer of any instance did. Queries
are short and run where they are called, on the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec

from schemas import topics
from schemas.facts import Claim, KeyRole
from schemas.ids import BatchId, FileId, OrganizationId
from schemas.settings import Kafka
from services.api import refusals
from services.api.principals import IssuedKey
from services.api.tables import TOPICS, Tables, connect, decode_claim, decode_state
from streams.core.lifecycle import BatchState
from streams.kafka.admin import Admin
from streams.kafka.follow import Follower
from streams.kafka.messages import KafkaFailed

BARRIER_TIMEOUT_S = 5.0
CATCH_UP_TIMEOUT_S = 600.0
BATCHES_KEPT_MS = 400 * 24 * 3_600_000
MOST_INSTANCES = 64


class FileRow(msgspec.Struct, frozen=True):
    """A file that was stored; it may be deleted or expired."""

    id: FileId
    organization: OrganizationId
    purpose: str
    bytes: int
    created_at_ms: int
    expires_at_ms: int
    object: str
    deleted: bool

    def live(self, now_ms: int) -> bool:
        return not self.deleted and now_ms < self.expires_at_ms


class PutRow(msgspec.Struct, frozen=True):
    """What was sent to a presigned URL."""

    file: FileId
    organization: OrganizationId
    object: str
    bytes: int


class PlacedClaim(msgspec.Struct, frozen=True):
    """A claim and when the broker appended it."""

    at_ms: int
    claim: Claim


_FILE = (
    "SELECT id, organization, purpose, bytes, created_at_ms, expires_at_ms, object, "
    "EXISTS (SELECT 1 FROM deleted WHERE deleted.id = files.id) FROM files "
)


class ReadModel:
    """Open it, `start` it (blocks until it has caught up), then ask; `stop` at the end.

    Several processes may share a directory: each takes a file of its own.
    """

    def __init__(self, kafka: Kafka, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock, self.slot = _take_file(directory)
        path = directory / f"readmodel-{self.slot}.sqlite"
        admin = Admin(kafka, "api-readmodel")
        cluster_id = admin.cluster_id()
        self._tables = Tables(path, cluster_id)
        offsets = self._tables.offsets()
        if _beyond_the_log(admin, offsets):
            # The topics were made anew under the same cluster id.
            self._tables.close()
            path.unlink()
            self._tables = Tables(path, cluster_id)
            offsets = {}
        self._reader = connect(path)
        self._reader.execute("PRAGMA query_only = ON")
        self._follower = Follower(kafka, "api-readmodel", TOPICS, self._tables.apply, offsets)
        self.ready = False
        """Whether it has caught up once; until then it knows too little to be asked."""
        self.path = path

    def start(self, timeout_s: float = CATCH_UP_TIMEOUT_S) -> None:
        self._follower.start()
        self._follower.wait_caught_up(timeout_s)
        self.ready = True

    def stop(self) -> None:
        self._follower.stop()
        self._reader.close()
        self._tables.close()
        os.close(self._lock)

    def catch_up(self) -> None:
        """`barrier` for a thread; raises KafkaFailed."""
        self._follower.wait_caught_up(BARRIER_TIMEOUT_S)

    @property
    def failure(self) -> BaseException | None:
        """What ended the following, if anything did: the process has to be started again."""
        return self._follower.failure

    async def barrier(self) -> None:
        """Wait until everything acknowledged so far can be read; 503 when the broker does not answer."""
        try:
            await self._follower.barrier(BARRIER_TIMEOUT_S)
        except KafkaFailed:
            raise refusals.unavailable() from None

    # Batches

    def batch(self, batch: str) -> BatchState | None:
        row = self._one("SELECT state FROM batches WHERE id = ?", batch)
        return None if row is None else decode_state(row[0])

    def batches(
        self, organization: str, limit: int, after: BatchState | None, now_ms: int
    ) -> list[BatchState]:
        """Newest first, from behind `after`."""
        at_ms, batch = (2**62, "") if after is None or after.created is None else _place(after)
        rows = self._reader.execute(
            "SELECT state FROM batches WHERE alive AND organization = ? AND created_at_ms > ? "
            "AND (created_at_ms, id) < (?, ?) ORDER BY created_at_ms DESC, id DESC LIMIT ?",
            (organization, now_ms - BATCHES_KEPT_MS, at_ms, batch, limit),
        )
        return [decode_state(state) for (state,) in rows]

    def waiting_records(self, organization: str) -> int:
        """Accepted records of the organization's batches that have not ended."""
        row = self._one(
            "SELECT coalesce(sum(accepted), 0) FROM batches WHERE open AND organization = ?", organization
        )
        assert row is not None
        return int(row[0])

    def open_batch_of(self, organization: str, file: str) -> BatchId | None:
        """A batch that has not ended and was created from this file."""
        row = self._one(
            "SELECT id FROM batches WHERE open AND organization = ? AND input_file_id = ? LIMIT 1",
            organization,
            file,
        )
        return None if row is None else BatchId(row[0])

    # Files

    def file(self, file: str) -> FileRow | None:
        row = self._one(_FILE + "WHERE id = ?", file)
        return None if row is None else _file_row(row)

    def put(self, file: str) -> PutRow | None:
        """The one use of a presigned URL."""
        row = self._one("SELECT file, organization, object, bytes FROM puts WHERE file = ?", file)
        return None if row is None else PutRow(FileId(row[0]), OrganizationId(row[1]), row[2], row[3])

    def files(
        self,
        organization: str,
        purpose: str | None,
        limit: int,
        after: FileRow | None,
        descending: bool,
        now_ms: int,
    ) -> list[FileRow]:
        compare, order = ("<", "DESC") if descending else (">", "ASC")
        start = (2**62, "") if descending else (-1, "")
        at_ms, file = start if after is None else (after.created_at_ms, after.id)
        rows = self._reader.execute(
            f"{_FILE} WHERE organization = ? AND (? IS NULL OR purpose = ?) AND expires_at_ms > ? "
            "AND NOT EXISTS (SELECT 1 FROM deleted WHERE deleted.id = files.id) "
            f"AND (created_at_ms, id) {compare} (?, ?) ORDER BY created_at_ms {order}, id {order} LIMIT ?",
            (organization, purpose, purpose, now_ms, at_ms, file, limit),
        )
        return [_file_row(row) for row in rows]

    def uses(self, file: str, since_ms: int) -> list[BatchId]:
        """The batches that creates began since then to make of this file, those not released."""
        rows = self._reader.execute(
            "SELECT batch FROM uses WHERE file = ? AND at_ms >= ? AND NOT released", (file, since_ms)
        )
        return [BatchId(batch) for (batch,) in rows]

    def files_applied(self) -> int:
        """The offset below which every fact about files is known."""
        row = self._one("SELECT next FROM offsets WHERE topic = ? AND partition = 0", topics.FILES)
        return 0 if row is None else int(row[0])

    # Keys and claims

    def issued_key(self, sha256: str) -> IssuedKey | None:
        row = self._one(
            "SELECT key_id, organization, role FROM keys WHERE sha256 = ? AND NOT revoked", sha256
        )
        return None if row is None else IssuedKey(row[0], OrganizationId(row[1]), KeyRole(row[2]))

    def claims(self, scope: str) -> list[PlacedClaim]:
        """All claims of a scope that are remembered, in the order in which they were made."""
        rows = self._reader.execute("SELECT at_ms, value FROM claims WHERE scope = ? ORDER BY next", (scope,))
        return [PlacedClaim(at_ms, decode_claim(value)) for at_ms, value in rows]

    def claim(self, claim: str) -> Claim | None:
        row = self._one("SELECT value FROM claims WHERE claim = ? LIMIT 1", claim)
        return None if row is None else decode_claim(row[0])

    def _one(self, query: str, *arguments: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._reader.execute(query, arguments).fetchone()
        return row


def _place(state: BatchState) -> tuple[int, str]:
    assert state.created is not None
    return state.created_at_ms, state.created.batch


def _file_row(row: tuple[Any, ...]) -> FileRow:
    file, organization, purpose, size, created, expires, name, deleted = row
    return FileRow(
        FileId(file), OrganizationId(organization), purpose, size, created, expires, name, bool(deleted)
    )


def _beyond_the_log(admin: Admin, offsets: dict[tuple[str, int], int]) -> bool:
    if not offsets:
        return False
    ends = admin.end_offsets(offsets)
    return any(offset > ends[partition] for partition, offset in offsets.items())


def _take_file(directory: Path) -> tuple[int, int]:
    for number in range(MOST_INSTANCES):
        descriptor = os.open(directory / f"readmodel-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor, number
        os.close(descriptor)
    raise RuntimeError(f"{MOST_INSTANCES} processes already use {directory}")
