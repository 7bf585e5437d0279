"""The batch routes."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from schemas import ids, topics
from schemas.batches import MAX_LISTED_ERRORS, Batch, BatchError, BatchErrors, BatchList
from schemas.facts import Cancel, batch_key
from schemas.ids import BatchId, FileId
from schemas.records import Rejected
from services.api import inline, orders, queries, refusals
from services.api.checking import Open, Opened
from services.api.claims import scope_of
from services.api.creation import Creation, Source
from services.api.incoming import SMALL_BODY_BYTES, Spool, declared_length, pieces
from services.api.parts import Parts
from services.api.principals import Principal
from services.api.readmodel import BATCHES_KEPT_MS
from services.api.refusals import Refusal
from services.api.validation import too_many_records
from streams.core.lifecycle import BatchState, to_api
from streams.core.strictjson import NotJson

MAX_IDEMPOTENCY_KEY = 255
LISTS_BYTES = 8 * 1024 * 1024
"""So much of the rejected records that reads show is remembered."""

PIECE_BYTES = 64 * 1024

_rejected = msgspec.json.Decoder(Rejected)
_encode = msgspec.json.encode


class BatchRoutes:
    def __init__(self, parts: Parts, creation: Creation) -> None:
        self._parts = parts
        self._creation = creation
        self._lists: OrderedDict[str, tuple[BatchErrors, int]] = OrderedDict()
        """The first rejected records of batches, and their bytes as sent; they never change."""
        self._lists_bytes = 0

    async def create(self, request: Request) -> Response:
        principal = _principal(request)
        limits = self._parts.settings.limits
        key = _idempotency_key(request)
        spool = Spool(self._parts.spool_directory, self._parts.threads)
        try:
            length = declared_length(request)
            large = length is None or length > SMALL_BODY_BYTES
            slots = self._parts.uploads.slots
            with slots.take(principal.organization) if large else contextlib.nullcontext():
                await self._receive(request, spool)
            opened = await self._open(principal, spool)
            order = orders.read(opened.fields, opened.items, limits.file_ttl_s)
            if order.input_file_id is not None and not ids.is_file_id(order.input_file_id):
                # Nobody can know it, so it goes into no fact.
                raise refusals.not_found()
            scope = scope_of(principal.organization, key, spool.sha256, _retries(request))
            file = None if order.input_file_id is None else FileId(order.input_file_id)
            source = Source(file, spool, opened.items or [])
            state = await self._creation.create(principal, order, scope, source)
        finally:
            spool.close()
        return await self._created(state)

    async def list(self, request: Request) -> Response:
        principal = _principal(request)
        limit = queries.integer(request, "limit", 20, 1, 100)
        await self._parts.model.barrier()
        after = None
        if (cursor := request.query_params.get("after")) is not None:
            after = self._own(cursor, principal)
        states = self._parts.model.batches(principal.organization, limit + 1, after, _now_ms())
        shown = states[:limit]
        names = [_id(state) for state in shown]
        page = BatchList([], names[0] if names else None, names[-1] if names else None, len(states) > limit)
        return StreamingResponse(self._page(page, shown), media_type="application/json")

    async def get(self, request: Request) -> Response:
        await self._parts.model.barrier()
        return _json(await self._shown(self._own(request.path_params["batch"], _principal(request))))

    async def cancel(self, request: Request) -> Response:
        principal = _principal(request)
        batch = BatchId(request.path_params["batch"])
        await self._parts.model.barrier()
        state = self._own(batch, principal)
        if state.status.terminal:
            raise Refusal(
                409,
                f"The batch has already ended: it is {state.status.value}.",
                code="batch_not_cancellable",
            )
        if not state.cancelled and state.settled is None:
            fact = Cancel(batch=batch)
            await self._parts.facts.append(
                topics.BATCHES,
                batch_key(fact, secrets.token_hex(8)),
                msgspec.json.encode(fact),
                topics.partition_of(batch, self._parts.settings.kafka.partitions),
            )
            await self._parts.model.barrier()
            state = self._own(batch, principal)
        return _json(await self._shown(state))

    async def _receive(self, request: Request, spool: Spool) -> None:
        limit = self._parts.settings.limits.max_file_bytes
        async for piece in pieces(request, limit, refusals.too_large(limit)):
            await spool.add(piece)
        await spool.end()

    async def _open(self, principal: Principal, spool: Spool) -> Opened:
        most = self._parts.settings.limits.max_records
        if spool.small is None:
            body = await spool.descriptor()
            return await self._parts.validation.open(principal.organization, Open(most), body)
        try:
            envelope = inline.scan(spool.small, most)
        except NotJson as error:
            raise refusals.invalid(f"The body {error}.") from None
        except inline.TooManyItems:
            raise too_many_records(most) from None
        return Opened(envelope.fields, envelope.items)

    def _own(self, batch: str, principal: Principal) -> BatchState:
        state = self._parts.model.batch(batch)
        if (
            state is None
            or state.created is None
            or not state.exists
            or state.created.organization != principal.organization
            or _now_ms() - state.created_at_ms > BATCHES_KEPT_MS
        ):
            raise refusals.not_found()
        return state

    async def _page(self, page: BatchList, states: Sequence[BatchState]) -> AsyncIterator[bytes]:
        """A page of the list, a batch at a time: with rejected records it may be large, and read slowly."""
        before, after = _around_empty(_encode(page), b'"data":[')
        yield before
        for number, state in enumerate(states):
            yield (b"," if number else b"") + _encode(await self._shown(state))
        yield after

    async def _shown(self, state: BatchState) -> Batch:
        """As reads show it."""
        assert state.created is not None
        name = state.created.rejected_object
        return to_api(state, None if name is None else await self._first_errors(name))

    async def _first_errors(self, name: str) -> BatchErrors:
        if name in self._lists:
            self._lists.move_to_end(name)
        else:
            errors = await self._parts.threads.run(self._read_errors, name)
            if name not in self._lists:
                self._lists[name] = errors, len(_encode(errors))
                self._lists_bytes += self._lists[name][1]
            while self._lists_bytes > LISTS_BYTES and len(self._lists) > 1:
                _, (_, size) = self._lists.popitem(last=False)
                self._lists_bytes -= size
        return self._lists[name][0]

    def _read_errors(self, name: str) -> BatchErrors:
        data: list[BatchError] = []
        rest = b""
        for piece in self._parts.blobs.stream(name, PIECE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            data += map(_shown_error, lines[: MAX_LISTED_ERRORS - len(data)])
            if len(data) == MAX_LISTED_ERRORS:
                break
        return BatchErrors(data)

    async def _created(self, state: BatchState) -> Response:
        """As create shows it: with every rejected record, of which there may be as much as was sent."""
        assert state.created is not None
        name = state.created.rejected_object
        if name is None or state.created.rejected <= MAX_LISTED_ERRORS:
            return _json(await self._shown(state))
        stream = await self._parts.threads.run(self._parts.blobs.stream, name, PIECE_BYTES)
        return StreamingResponse(self._with_all_errors(state, stream), media_type="application/json")

    async def _with_all_errors(self, state: BatchState, stream: Iterator[bytes]) -> AsyncIterator[bytes]:
        before, after = _around_empty(_encode(to_api(state, BatchErrors([]))), b'"errors":{"data":[')
        yield before
        rest, comma = b"", b""
        async with contextlib.aclosing(self._parts.threads.chunks(stream)) as pieces_read:
            async for piece in pieces_read:
                *lines, rest = (rest + piece).split(b"\n")
                if lines:
                    yield comma + b",".join(_encode(_shown_error(line)) for line in lines)
                    comma = b","
        yield after


def _principal(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _json(value: msgspec.Struct) -> Response:
    return Response(_encode(value), media_type="application/json")


def _id(state: BatchState) -> BatchId:
    assert state.created is not None
    return state.created.batch


def _shown_error(line: bytes) -> BatchError:
    each = _rejected.decode(line)
    return BatchError(each.code, each.message, each.param, each.line, each.custom_id)


def _around_empty(encoded: bytes, opening: bytes) -> tuple[bytes, bytes]:
    """The JSON before and behind the items of a list that is empty in it. `opening` leads to their place.

    Outside strings it occurs once, and in one its quotes would be escaped.
    """
    before, empty, after = encoded.partition(opening + b"]")
    assert empty, "the list is empty, and its field is sent"
    return before + opening, b"]" + after


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_IDEMPOTENCY_KEY:
        raise refusals.invalid(
            f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY} characters.", "Idempotency-Key"
        )
    return key


def _retries(request: Request) -> int:
    text = request.headers.get("x-stainless-retry-count", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
