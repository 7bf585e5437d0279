"""From a record's body to its result."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import msgspec

from schemas.ids import BatchId
from schemas.money import Usage
from schemas.records import INLINE_BODY_BYTES, Answered, Failed, Ref, Request
from streams.blobs.port import Blobs
from streams.core import answers, bodies
from streams.core.judge import CodedFailure, End, HttpFailure, Reply, Succeeded
from streams.dispatch.jobs import Work
from streams.pools.endpoint import Endpoint


class BodyStore:
    """Bodies too large for a message: requests are read from the input, answers are put beside it."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def request(self, request: Request) -> bytes:
        """The body to send; raises BlobMissing when the input object is gone."""
        if isinstance(request.body, msgspec.Raw):
            return bytes(request.body)
        assert isinstance(request.ref, Ref), "a request has a body or says where it is"
        ref = request.ref
        return bodies.split_body(await self.read(ref))[1]

    async def read(self, ref: Ref) -> bytes:
        return await asyncio.to_thread(self._blobs.read_range, ref.object, ref.offset, ref.length)

    async def answer(self, batch: BatchId, index: int, body: bytes) -> dict[str, Any]:
        """The field of a result that carries `body`.

        Each run of a record writes an object of its own, so that a repeated one never changes what an
        accepted result points to; the sink deletes a batch's objects when it has ended.
        """
        if len(body) <= INLINE_BODY_BYTES:
            return {"body": msgspec.Raw(body)}
        name = f"batches/{batch}/answers/{index}-{uuid.uuid4().hex}"
        await asyncio.to_thread(self._blobs.put, name, body)
        return {"ref": Ref(name, 0, len(body))}


def body_for(endpoint: Endpoint, body: bytes) -> bytes:
    """The body as `endpoint` wants it: byte-exact but for the model's name there, if it is another."""
    if endpoint.remote_model is None:
        return body
    return bodies.with_model(body, endpoint.remote_model)


def named(end: End, endpoint: Endpoint, model: str) -> End:
    """The end of a call with the model's name as the customer wrote it."""
    if endpoint.remote_model is None:
        return end
    match end:
        case Succeeded(reply, answer) if "model" in answer.parsed:
            return Succeeded(reply._replace(body=bodies.with_model(reply.body, model)), answer)
        case HttpFailure(reply):
            said = bodies.with_model_said(reply.body, endpoint.remote_model, model)
            return HttpFailure(reply._replace(body=said))
    return end


async def result_of(work: Work, end: End, store: BodyStore) -> Answered | Failed:
    """The record for `results`."""
    batch, index, custom_id = work.request.batch, work.request.index, work.request.custom_id
    match end:
        case Succeeded(reply, answer):
            return await answered(
                work, store, reply, reply.body, usage=answer.usage, unmetered=answer.unmetered
            )
        case HttpFailure(reply):
            return Failed(
                batch=batch,
                index=index,
                custom_id=custom_id,
                origin=work.origin,
                status_code=reply.status,
                request_id=_request_id(reply),
                **await store.answer(batch, index, answers.error_body(reply.body)),
            )
        case CodedFailure(code, message):
            return failed(work, code, message)


async def answered(
    work: Work, store: BodyStore, reply: Reply, body: bytes, *, usage: Usage | None, unmetered: str
) -> Answered:
    """A line for the output file with this body, billed for this usage."""
    batch, index = work.request.batch, work.request.index
    return Answered(
        batch=batch,
        index=index,
        custom_id=work.request.custom_id,
        origin=work.origin,
        status_code=reply.status,
        request_id=_request_id(reply),
        usage=usage,
        unmetered=unmetered,
        **await store.answer(batch, index, answers.compact(body)),
    )


def failed(work: Work, code: str, message: str) -> Failed:
    request = work.request
    return Failed(
        batch=request.batch,
        index=request.index,
        custom_id=request.custom_id,
        origin=work.origin,
        code=code,
        message=message,
    )


def _request_id(reply: Reply) -> str:
    return reply.request_id or new_request_id()


def new_request_id() -> str:
    """For an answer whose server named none; unique, and no secret."""
    return f"req_{random.getrandbits(128):032x}"
