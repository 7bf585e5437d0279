"""The file routes."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from schemas import ids
from schemas.files import File, FileDeletion, FileList, Presigned
from schemas.ids import FileId, OrganizationId
from services.api import queries, ranges, refusals
from services.api.incoming import check_encoding, declared_length, pieces, small_body
from services.api.multipart import OVERHEAD_BYTES, UploadForm
from services.api.parts import Parts
from services.api.presign import Ticket
from services.api.principals import Principal
from services.api.readmodel import FileRow, PutRow
from services.api.refusals import Refusal
from services.api.uploads import (
    Arrival,
    Attempt,
    Pending,
    RecordCounter,
    expiry,
    owner_of,
    parse_put,
)
from streams.blobs import BlobMissing
from streams.crashpoints import passing

LEAST_TTL_S, MOST_TTL_S = 3_600, 2_592_000
MAX_LISTED = 10_000
DOWNLOAD_CHUNK_BYTES = 256 * 1024
PENDING_TTL_S = 3_600
"""After this an upload that never became a file is swept; far longer than any step between takes."""


class FileRoutes:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._putting: set[FileId] = set()
        """Files whose PUT is under way here."""

    async def create(self, request: Request) -> Response:
        principal = _principal(request)
        limits = self._parts.settings.limits
        check_encoding(request)
        too_large = refusals.too_large(limits.max_file_bytes)
        if (declared_length(request) or 0) > limits.max_file_bytes + OVERHEAD_BYTES:
            raise too_large
        form = UploadForm(request.headers.get("content-type", ""))
        uploads = self._parts.uploads
        file = uploads.new_file()
        name = Pending(file, expiry(PENDING_TTL_S)).name
        with uploads.slots.take(principal.organization):

            async def file_pieces() -> AsyncIterator[bytes]:
                body = pieces(request, limits.max_file_bytes + OVERHEAD_BYTES, too_large)
                async for piece in body:
                    for part in form.feed(piece):
                        yield part
                form.end()
                _check_purpose(form.fields["purpose"])
                _ttl(form.fields, limits.file_ttl_s)

            await uploads.receive(name, file_pieces(), limits.max_file_bytes, RecordCounter(limits))
            row = await uploads.register(
                name, file, principal.organization, _ttl(form.fields, limits.file_ttl_s)
            )
        return _json(to_api(row))

    async def presign(self, request: Request) -> Response:
        principal = _principal(request)
        limits = self._parts.settings.limits
        fields = queries.json_object(await small_body(request))
        queries.only_known(fields, "bytes", "filename")
        size = queries.whole(fields.get("bytes"))
        if size is None or size < 1:
            raise refusals.invalid("bytes must be the size of the file, an integer of at least 1.", "bytes")
        if not isinstance(fields.get("filename", ""), str):
            raise refusals.invalid("filename must be a string.", "filename")
        if size > limits.max_file_bytes:
            raise refusals.too_large(limits.max_file_bytes)
        ticket = Ticket(
            self._parts.uploads.new_file(), principal.organization, size, expiry(limits.presign_ttl_s)
        )
        url = await self._put_url(request, ticket)
        await self._parts.uploads.announce(ticket.file, ticket.organization, ticket.expires + PENDING_TTL_S)
        return _json(Presigned(ticket.file, url, ticket.expires))

    async def put(self, request: Request) -> Response:
        ticket = self._parts.signer.verify(request.path_params["file"], request.url.query, time.time())
        if ticket is None:
            raise Refusal(403, "This upload URL is not valid or its time is over.", code="invalid_signature")
        check_encoding(request)
        length = declared_length(request)
        if length is None:
            raise Refusal(411, "Send the body with Content-Length.")
        if length != ticket.bytes:
            raise _wrong_size(ticket)
        if ticket.file in self._putting:
            raise _used()
        self._putting.add(ticket.file)
        try:
            await self._receive(request, ticket)
        finally:
            self._putting.discard(ticket.file)
        return Response(status_code=200)

    async def complete(self, request: Request) -> Response:
        principal = _principal(request)
        file = request.path_params["file"]
        await self._parts.model.barrier()
        if (row := self._parts.model.file(file)) is not None:
            return _json(to_api(self._own(row, principal)))
        put = self._parts.model.put(file)
        if put is None and ids.is_file_id(file):
            put = await self._arrived(FileId(file), principal.organization)
        if put is None:
            if ids.is_file_id(file) and await self._parts.uploads.announced(file, principal.organization):
                raise refusals.invalid("Nothing was uploaded to this file's URL yet.", code="not_uploaded")
            raise refusals.not_found()
        if put.organization != principal.organization:
            raise refusals.not_found()
        async with self._parts.uploads.locks.hold(file):
            row = await self._complete(put)
        return _json(to_api(self._own(row, principal)))

    async def _put_url(self, request: Request, ticket: Ticket) -> str:
        if (urls := self._parts.put_urls) is not None:
            owner = owner_of(ticket.organization)
            arrival = Arrival(ticket.file, owner, ticket.bytes, ticket.expires + PENDING_TTL_S)
            ttl_s = self._parts.settings.limits.presign_ttl_s
            return await self._parts.threads.run(urls.sign, arrival.name, ticket.bytes, ttl_s)
        base = self._parts.settings.http.public_url or f"{request.url.scheme}://{request.url.netloc}"
        return f"{base.rstrip('/')}/v1/uploads/{ticket.file}?{self._parts.signer.query(ticket)}"

    async def _arrived(self, file: FileId, organization: OrganizationId) -> PutRow | None:
        """What was PUT to a URL of the bucket, from now on its one use; None when nothing was.

        It does not matter what the settings say now: they may have been others when the URL was made.
        """
        passing("api.arriving")
        async with self._parts.uploads.locks.hold(file):
            arrival = await self._parts.uploads.arrival(file, organization)
            # Also when nothing is there: another instance may just have taken it.
            await self._parts.model.barrier()
            if (put := self._parts.model.put(file)) is None and arrival is not None:
                put = await self._take(arrival, organization)
            return put

    async def _take(self, arrival: Arrival, organization: OrganizationId) -> PutRow | None:
        uploads, model = self._parts.uploads, self._parts.model
        if time.time() > arrival.expires:
            raise refusals.not_found()
        attempt = Attempt(arrival.file, secrets.token_hex(8), arrival.expires)
        try:
            await uploads.take(arrival, attempt)
        except BlobMissing:
            await model.barrier()
            return model.put(arrival.file)
        passing("api.taking")
        await uploads.use(attempt, organization, arrival.bytes)
        passing("api.taken")
        await model.barrier()
        first = model.put(arrival.file)
        if first is None or first.object != attempt.name:
            await uploads.discard(attempt.name)
        await uploads.discard(arrival.name)
        return first

    async def _receive(self, request: Request, ticket: Ticket) -> None:
        """Take the body of a PUT; 409 unless it is the URL's one use."""
        uploads, model = self._parts.uploads, self._parts.model
        await model.barrier()
        if model.put(ticket.file) is not None:
            raise _used()
        attempt = Attempt(ticket.file, secrets.token_hex(8), ticket.expires + PENDING_TTL_S)
        with uploads.slots.take(ticket.organization):
            body = pieces(request, ticket.bytes, _wrong_size(ticket))
            await uploads.receive(attempt.name, body, ticket.bytes, None)
        passing("api.putting")
        await uploads.use(attempt, ticket.organization, ticket.bytes)
        passing("api.put")
        await model.barrier()
        first = model.put(ticket.file)
        if first is None or first.object != attempt.name:
            await uploads.discard(attempt.name)
            raise _used()

    async def _complete(self, put: PutRow) -> FileRow:
        """The file, made of what was PUT if nobody has made it yet."""
        uploads, model = self._parts.uploads, self._parts.model
        await model.barrier()
        if (row := model.file(put.file)) is not None:
            return row
        attempt = parse_put(put.object)
        if attempt is None or time.time() > attempt.expires:
            raise refusals.not_found()
        try:
            await uploads.check(put)
        except BlobMissing:
            # Another instance may have completed it, and the file been deleted, since we looked.
            await model.barrier()
            if (row := model.file(put.file)) is None:
                raise
            return row
        await uploads.complete(put, self._parts.settings.limits.file_ttl_s)
        await model.barrier()
        row = model.file(put.file)
        assert row is not None
        return row

    async def list(self, request: Request) -> Response:
        principal = _principal(request)
        limit = queries.integer(request, "limit", MAX_LISTED, 1, MAX_LISTED)
        descending = queries.choice(request, "order", "desc", "asc") == "desc"
        await self._parts.model.barrier()
        after = None
        if (cursor := request.query_params.get("after")) is not None:
            after = self._parts.model.file(cursor)
            if after is None or after.organization != principal.organization:
                raise refusals.not_found()
        rows = self._parts.model.files(
            principal.organization,
            request.query_params.get("purpose"),
            limit + 1,
            after,
            descending,
            _now_ms(),
        )
        data = [to_api(row) for row in rows[:limit]]
        return _json(
            FileList(data, data[0].id if data else None, data[-1].id if data else None, len(rows) > limit)
        )

    async def get(self, request: Request) -> Response:
        return _json(to_api(await self._file(request)))

    async def delete(self, request: Request) -> Response:
        row = await self._file(request)
        batch = await self._parts.uses.delete(row, secrets.token_hex(8))
        if batch is not None:
            raise Refusal(409, f"The file is the input of {batch}, which has not ended.", code="file_in_use")
        await self._parts.uploads.discard(row.object)
        return _json(FileDeletion(row.id))

    async def content(self, request: Request) -> Response:
        row = await self._file(request)
        etag = f'"{row.id}"'
        headers = {
            "etag": etag,
            "accept-ranges": "bytes",
            "content-disposition": f'attachment; filename="{row.id}.jsonl"',
        }
        span = None
        if request.headers.get("if-range", etag) == etag:
            try:
                span = ranges.parse(request.headers.get("range"), row.bytes)
            except ranges.Unsatisfiable:
                raise Refusal(
                    416,
                    f"The file has {row.bytes} bytes; the range lies outside.",
                    headers={"content-range": f"bytes */{row.bytes}"},
                ) from None
        offset, length = span or (0, row.bytes)
        headers["content-length"] = str(length)
        if span is not None:
            headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{row.bytes}"
        status = 200 if span is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type="application/octet-stream")
        try:
            stream = await self._parts.threads.run(
                self._parts.blobs.stream, row.object, DOWNLOAD_CHUNK_BYTES, offset, length
            )
        except BlobMissing:
            # Deleted between the look and the opening.
            raise refusals.not_found() from None
        return StreamingResponse(
            self._parts.threads.chunks(stream), status, headers, media_type="application/octet-stream"
        )

    async def _file(self, request: Request) -> FileRow:
        """The file of the path, if it is there for this caller."""
        await self._parts.model.barrier()
        row = self._parts.model.file(request.path_params["file"])
        if row is None:
            raise refusals.not_found()
        return self._own(row, _principal(request))

    def _own(self, row: FileRow, principal: Principal) -> FileRow:
        if row.organization != principal.organization or not row.live(_now_ms()):
            raise refusals.not_found()
        return row


def to_api(row: FileRow) -> File:
    return File(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created_at_ms // 1000,
        expires_at=row.expires_at_ms // 1000,
        filename=f"{row.id}.jsonl",
        purpose=row.purpose,
    )


def _principal(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _check_purpose(purpose: str) -> None:
    if purpose != "batch":
        raise refusals.invalid('purpose must be "batch".', "purpose")


def _ttl(fields: dict[str, str], default: int) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    if anchor != "created_at":
        raise refusals.invalid('expires_after[anchor] must be "created_at".', "expires_after[anchor]")
    text = seconds or ""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and LEAST_TTL_S <= int(text) <= MOST_TTL_S):
        raise refusals.invalid(
            f"expires_after[seconds] must be an integer from {LEAST_TTL_S} to {MOST_TTL_S}.",
            "expires_after[seconds]",
        )
    return int(text)


def _wrong_size(ticket: Ticket) -> Refusal:
    return refusals.invalid(f"The body must have the {ticket.bytes} bytes that were announced.", "bytes")


def _used() -> Refusal:
    return Refusal(409, "This upload URL has been used.", code="upload_url_used")
