"""From bytes on the wire to a file that exists.

A multipart upload, or the records of a create:

 1. The bytes go to `pending/<file>.<expiry>`, counted and looked at as they come. Dying here leaves nothing:
    an object appears whole or not at all.
 2. `uploads/<file>` is made from it. Dying here leaves two objects nobody knows; the sweeper removes them
    once the expiry in the pending name has passed.
 3. The fact `stored` is acknowledged: the file exists.
 4. The pending object goes. Dying before leaves it to the sweeper.

With a presigned URL, where an empty object below `tickets/` says for how long and for whom the URL is out:

 1. Each PUT writes an object of its own, `puts/<file>.<attempt>.<expiry>`. Dying here leaves the URL unused.
 2. It appends the fact `put`. The first by offset is the URL's one use, whichever instances the PUTs went to;
    all others are told 409, and what they wrote goes. Dying here leaves the URL used: the file can be
    completed, though nobody told the client so.
 3. `complete` looks at the object of that PUT and appends `stored`, which names it; nothing is copied. So it
    may be repeated, and run on several instances at once: of several `stored` the first holds, and all name
    the same object. A refusal takes nothing away either, and is the same each time.

With a URL of the bucket itself (`storage.presigned_puts`) nobody but the first `complete` can say which PUT
was the one use, since the bucket takes as many as come:

 1. Each PUT writes `arrivals/<file>.<owner>.<bytes>.<expiry>`, over the one before. The name is signed, so
    it says for whom and how large the file is.
 2. `complete` copies that object to one of its own below `puts/`, which no URL reaches; a copy is of one PUT,
    whole. Dying here leaves the URL unused.
 3. It appends `put`, as above: the first by offset is the use, and what others have copied goes. Dying here
    leaves the bytes fixed and the file to be completed.
 4. The arrival goes. Dying before, like a PUT that comes later, leaves it to the sweeper.
 5. The rest is 3 above.

The sweeper removes objects of PUTs that no file names, and arrivals, once the expiry in their name has
passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator

import msgspec

from schemas import ids, topics
from schemas.facts import FilePut, FileStored
from schemas.ids import FileId, OrganizationId
from schemas.settings import Limits
from services.api import refusals
from services.api.locks import Locks
from services.api.readmodel import FileRow, PutRow
from services.api.refusals import Refusal
from services.api.slots import Slots
from services.api.threads import StorageThreads
from services.api.writing import FactWriter
from streams import metrics
from streams.blobs import Blobs, Writer, why_failed
from streams.core.validate import Lines, UnsupportedEncoding

BLOCK_BYTES = 1024 * 1024

log = logging.getLogger("openrelay.api")


class Pending(msgspec.Struct, frozen=True):
    """An object that is not yet a file."""

    file: FileId
    expires: int

    @property
    def name(self) -> str:
        return f"pending/{self.file}.{self.expires}"


class Attempt(msgspec.Struct, frozen=True):
    """One PUT to a presigned URL, and the object it writes."""

    file: FileId
    id: str
    expires: int
    """Unix seconds: afterwards the upload cannot be completed any more."""

    @property
    def name(self) -> str:
        return f"puts/{self.file}.{self.id}.{self.expires}"


class Arrival(msgspec.Struct, frozen=True):
    """What a URL of the bucket writes, as often as it is used."""

    file: FileId
    owner: str
    bytes: int
    expires: int
    """As for an attempt; the URL itself ends earlier."""

    @property
    def name(self) -> str:
        return f"arrivals/{self.file}.{self.owner}.{self.bytes}.{self.expires}"


class Uploads:
    def __init__(self, blobs: Blobs, threads: StorageThreads, facts: FactWriter, limits: Limits) -> None:
        self._blobs = blobs
        self._threads = threads
        self._facts = facts
        self._limits = limits
        self.slots = Slots(limits.max_concurrent_uploads)
        self.locks = Locks()
        """By file id: one complete at a time, so that a file is not looked at twice at once."""

    def new_file(self) -> FileId:
        return ids.file_id(secrets.token_bytes(ids.ENTROPY_BYTES))

    async def receive(
        self, name: str, pieces: AsyncIterator[bytes], limit: int, counter: RecordCounter | None
    ) -> int:
        """Write the pieces to a pending object; its size. Refuses at the first byte over `limit`.

        The object becomes visible when the last piece is in; whatever is raised before leaves nothing.
        """
        sink = _Sink(self._blobs, name, counter)
        try:
            block: list[bytes] = []
            waiting = size = 0
            async for piece in pieces:
                size += len(piece)
                if size > limit:
                    raise refusals.too_large(limit)
                block.append(piece)
                waiting += len(piece)
                if waiting >= BLOCK_BYTES:
                    await self._threads.run(sink.write, b"".join(block))
                    block, waiting = [], 0
            return await self._threads.run(sink.finish, b"".join(block))
        finally:
            await asyncio.shield(self._threads.run(sink.close))

    async def announce(self, file: FileId, organization: OrganizationId, expires: int) -> None:
        """Remember whose a presigned upload is, so that `complete` tells early from foreign."""
        await self._threads.run(self._blobs.put, f"tickets/{file}.{owner_of(organization)}.{expires}", b"")

    async def announced(self, file: FileId, organization: OrganizationId) -> bool:
        owner = owner_of(organization)
        return bool(await self._threads.run(self._blobs.list, f"tickets/{file}.{owner}."))

    async def use(self, attempt: Attempt, organization: OrganizationId, size: int) -> None:
        """Say that the object of this attempt is whole. Who was first only the log can tell."""
        fact = FilePut(file=attempt.file, organization=organization, object=attempt.name, bytes=size)
        await self._facts.append(
            topics.FILES, f"{attempt.file}:put:{attempt.id}", msgspec.json.encode(fact), 0
        )

    async def arrival(self, file: FileId, organization: OrganizationId) -> Arrival | None:
        """What was PUT to the bucket for a file of this organization."""
        names = await self._threads.run(self._blobs.list, f"arrivals/{file}.{owner_of(organization)}.")
        return parse_arrival(names[0]) if names else None

    async def take(self, arrival: Arrival, attempt: Attempt) -> None:
        """Make an object that no URL reaches of what has arrived; raises BlobMissing when it is gone."""
        await self._threads.run(self._take, arrival, attempt)

    async def check(self, put: PutRow) -> None:
        """Look at an object that was PUT as an upload is looked at while it comes in."""
        await self._threads.run(self._check, put)

    async def complete(self, put: PutRow, ttl_s: int) -> None:
        """Make an object that was PUT a file, unless it is one already."""
        await self._store(put.file, put.organization, put.object, put.bytes, ttl_s)

    async def register(self, name: str, file: FileId, organization: OrganizationId, ttl_s: int) -> FileRow:
        """Make a pending object a file."""
        target = f"uploads/{file}"
        await self._threads.run(self._blobs.copy, name, target)
        size = await self._threads.run(self._blobs.size, target)
        stored_at_ms = await self._store(file, organization, target, size, ttl_s)
        await self.discard(name)
        expires_at_ms = stored_at_ms + ttl_s * 1000
        return FileRow(file, organization, "batch", size, stored_at_ms, expires_at_ms, target, False)

    async def may_exist(self, name: str) -> bool:
        """Whether an object is there; also when nobody can say."""
        try:
            return await self._threads.run(self._blobs.exists, name)
        except Exception as error:
            if why_failed(error) is None:
                raise
            return True

    async def discard(self, name: str) -> None:
        """Remove an object that nobody needs any more, or leave that to the sweeper."""
        try:
            await self._threads.run(self._blobs.delete, name)
        except Exception as error:
            if (why := why_failed(error)) is None:
                raise
            log.warning("%s is left to the sweeper: %s", name, why)

    async def _store(
        self, file: FileId, organization: OrganizationId, name: str, size: int, ttl_s: int
    ) -> int:
        """Append `stored`; when the broker did."""
        fact = FileStored(file=file, organization=organization, object=name, bytes=size, ttl_s=ttl_s)
        delivery = await self._facts.append(
            topics.FILES, f"{file}:stored:{secrets.token_hex(8)}", msgspec.json.encode(fact), 0
        )
        metrics.API_UPLOADS.inc()
        metrics.API_UPLOAD_BYTES.inc(size)
        return delivery.timestamp_ms

    def _take(self, arrival: Arrival, attempt: Attempt) -> None:
        # A bucket checks the size if it checks signed headers, as it should.
        if self._blobs.size(arrival.name) != arrival.bytes:
            raise _another_size(arrival.bytes)
        self._blobs.copy(arrival.name, attempt.name)

    def _check(self, put: PutRow) -> None:
        if self._blobs.size(put.object) != put.bytes:
            raise _another_size(put.bytes)
        counter = RecordCounter(self._limits)
        for piece in self._blobs.stream(put.object):
            counter.feed(piece)
        counter.end()


class RecordCounter:
    """Refuses a file that cannot be a batch's input: UTF-16, without a record, or with too many."""

    def __init__(self, limits: Limits) -> None:
        self._lines = Lines(limits.max_record_bytes)
        self._most = limits.max_records
        self._records = 0

    def feed(self, data: bytes) -> None:
        try:
            self._count(sum(1 for _ in self._lines.feed(data)))
        except UnsupportedEncoding:
            raise _utf16() from None

    def end(self) -> None:
        try:
            self._count(sum(1 for _ in self._lines.end()))
        except UnsupportedEncoding:
            raise _utf16() from None
        if self._records == 0:
            raise refusals.invalid("The file holds no record.", "file", "empty_file")

    def _count(self, more: int) -> None:
        self._records += more
        if self._records > self._most:
            raise refusals.invalid(
                f"The file holds more than {self._most:,} records; split it into several.",
                "file",
                "too_many_records",
            )


def _another_size(size: int) -> Refusal:
    return refusals.invalid(f"The stored object has not the {size} bytes announced.")


def _utf16() -> Refusal:
    return refusals.invalid("The file is UTF-16; send UTF-8.", "file", "unsupported_encoding")


class _Sink:
    """The blocking side of one upload; each call runs in a thread, one after another."""

    def __init__(self, blobs: Blobs, name: str, counter: RecordCounter | None) -> None:
        self._stack = contextlib.ExitStack()
        self._blobs = blobs
        self._name = name
        self._writer: Writer | None = None
        self._counter = counter

    def write(self, block: bytes) -> None:
        if self._writer is None:
            self._writer = self._stack.enter_context(self._blobs.writer(self._name))
        if self._counter is not None:
            self._counter.feed(block)
        self._writer.write(block)

    def finish(self, block: bytes) -> int:
        self.write(block)
        if self._counter is not None:
            self._counter.end()
        assert self._writer is not None
        return self._writer.commit()

    def close(self) -> None:
        self._stack.close()


def owner_of(organization: OrganizationId) -> str:
    """An organization in an object's name, whatever characters its id has."""
    return hashlib.sha256(organization.encode()).hexdigest()[:16]


def parse_pending(name: str) -> Pending | None:
    match = re.fullmatch(r"pending/(file-[0-9a-f]{32})\.([0-9]+)", name)
    return match and Pending(FileId(match[1]), int(match[2]))


def parse_put(name: str) -> Attempt | None:
    match = re.fullmatch(r"puts/(file-[0-9a-f]{32})\.([0-9a-f]+)\.([0-9]+)", name)
    return match and Attempt(FileId(match[1]), match[2], int(match[3]))


def parse_arrival(name: str) -> Arrival | None:
    match = re.fullmatch(r"arrivals/(file-[0-9a-f]{32})\.([0-9a-f]{16})\.([0-9]+)\.([0-9]+)", name)
    return match and Arrival(FileId(match[1]), match[2], int(match[3]), int(match[4]))


def ticket_expiry(name: str) -> int:
    """When an announced upload is over, Unix seconds."""
    return int(name.rpartition(".")[2])


def expiry(ttl_s: float) -> int:
    """Unix seconds from now."""
    return int(time.time() + ttl_s)
