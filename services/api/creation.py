"""Creating a batch.

 1. A claim decides the batch's id (see `claims`). Dying here or later leaves a claim that a repeat of the
    request takes over.
 2. The batch gets its own copy of its input; for inline records that is first written as an upload of its
    own. Object names carry the time and the attempt. Dying leaves objects nobody knows, which the sweeper
    finds by their age.
 3. One strict pass judges every record; rejected ones go to an object beside the input.
 4. For inline records, the input becomes a file.
 5. The fact `created` is acknowledged: the batch exists, and the caller gets it. When the acknowledgement
    stays open the caller gets 503 and the fact `withdrawn` follows, which no later reader can miss.

Of several attempts for one id the first `created` holds; an attempt that lost shows the winner's batch when
the winner's request was the same, and a conflict when it was not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

import msgspec

from schemas import topics
from schemas.facts import MAX_FACT_BYTES, BatchFact, Created, FileDeleted, Withdrawn, batch_key
from schemas.ids import BatchId, FileId, OrganizationId
from schemas.money import Price
from services.api import refusals
from services.api.checking import Check, LayOut, Verdict
from services.api.claims import Claims, Scope
from services.api.incoming import Spool
from services.api.locks import Locks
from services.api.orders import Order
from services.api.parts import Parts
from services.api.principals import Principal
from services.api.refusals import Refusal
from services.api.uploads import Pending, expiry, owner_of
from services.api.writing import Uncertain
from streams.blobs import BlobMissing
from streams.core import pricing
from streams.core.lifecycle import BatchState, fold
from streams.kafka.messages import Delivery

PENDING_TTL_S = 3_600
WITHDRAW_EVERY_S = 5.0

log = logging.getLogger("openrelay.api")


class _Objects(msgspec.Struct, frozen=True):
    """Names of one attempt's objects."""

    input: str
    rejected: str


class Creation:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._claims = Claims(parts.model, parts.facts, parts.settings.kafka.partitions)
        self._scopes = Locks()
        self._reserved: dict[OrganizationId, int] = {}
        self._withdrawing: dict[BatchId, asyncio.Task[None]] = {}

    async def create(
        self,
        principal: Principal,
        order: Order,
        scope: Scope,
        spool: Spool,
        items: list[tuple[int, int]] | None,
    ) -> BatchState:
        """The batch of this request: new, or as it is now when the request was sent before.

        `items` says where inline records lie in the body that `spool` holds.
        """
        async with self._scopes.hold(scope.name):
            file = FileId(order.input_file_id) if order.input_file_id else self._parts.uploads.new_file()
            claim = await self._claims.settle(scope, file)
            if claim.batch in self._withdrawing:
                # What can be seen of this batch now is about to go.
                raise refusals.unavailable()
            state = self._parts.model.batch(claim.batch)
            if state is not None and state.exists:
                return self._same_request(claim.batch, scope)
            attempt = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"
            objects = _Objects(
                f"batches/{claim.batch}/input-{attempt}.jsonl",
                f"batches/{claim.batch}/rejected-{attempt}.jsonl",
            )
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(self._remove, objects)
                if order.input_file_id is None:
                    file = claim.input_file_id
                    pending = Pending(file, owner_of(principal.organization), 0, expiry(PENDING_TTL_S)).name
                    undo.push_async_callback(self._parts.uploads.discard, pending)
                    await self._lay_out(order, spool, items or [], pending)
                    source = pending
                else:
                    source = self._input(principal, order.input_file_id)
                verdict = await self._check(principal, order, source, objects)
                with self._quota(principal, verdict.total - verdict.rejected):
                    if order.input_file_id is None:
                        await self._parts.uploads.register(
                            pending, file, principal.organization, self._parts.settings.limits.file_ttl_s
                        )
                        undo.push_async_callback(self._forget_file, principal, file)
                    created = self._fact(principal, order, file, claim.batch, claim.claim, verdict, objects)
                    state = await self._append(created, attempt, undo)
                if state.created != created:
                    # Another attempt was first; what this one made goes.
                    return self._same_request(claim.batch, scope)
                undo.pop_all()
                return state

    async def close(self) -> None:
        """Give withdrawals under way a last moment."""
        tasks = list(self._withdrawing.values())
        if tasks:
            await asyncio.wait(tasks, timeout=WITHDRAW_EVERY_S)
        for task in tasks:
            task.cancel()

    def _same_request(self, batch: BatchId, scope: Scope) -> BatchState:
        state = self._parts.model.batch(batch)
        assert state is not None
        winner = self._claims.winner(batch)
        if winner is None or winner.body_sha256 != scope.body_sha256:
            raise Refusal(
                409,
                "This Idempotency-Key was used with another request body.",
                code="idempotency_conflict",
                param="Idempotency-Key",
            )
        return state

    def _input(self, principal: Principal, file: str) -> str:
        """The object behind an input file that may be used."""
        row = self._parts.model.file(file)
        now_ms = time.time_ns() // 1_000_000
        if row is None or row.organization != principal.organization or not row.live(now_ms):
            raise refusals.not_found()
        if row.purpose != "batch":
            raise refusals.invalid(
                f"The file has the purpose {row.purpose}; an input file has batch.", "input_file_id"
            )
        return row.object

    async def _lay_out(self, order: Order, spool: Spool, items: list[tuple[int, int]], target: str) -> None:
        job = LayOut(target, order.endpoint, items)
        await self._parts.validation.lay_out(job, await spool.descriptor())

    async def _check(self, principal: Principal, order: Order, source: str, objects: _Objects) -> Verdict:
        settings = self._parts.settings
        with self._quota(principal, 0):
            pass
        try:
            await self._parts.threads.run(self._parts.blobs.copy, source, objects.input)
        except BlobMissing:
            # Deleted between the look and the copy.
            raise refusals.not_found() from None
        verdict = await self._parts.validation.check(
            Check(
                input_object=objects.input,
                rejected_object=objects.rejected,
                endpoint=order.endpoint,
                models=list(settings.models),
                workflows_enabled="workflows" in principal.features,
                egress=settings.egress,
                limits=settings.limits,
            )
        )
        if verdict.total == 0:
            raise refusals.invalid("The file holds no record.", "input_file_id", "empty_file")
        return verdict

    @contextlib.contextmanager
    def _quota(self, principal: Principal, records: int) -> Iterator[None]:
        """Hold a place for `records` more of the organization's waiting records, or refuse.

        Creates under way count, so that several at once do not pass together; once the batch is in the read
        model it counts there.
        """
        organization = principal.organization
        most = self._parts.settings.limits.max_waiting_records
        reserved = self._reserved.get(organization, 0)
        waiting = self._parts.model.waiting_records(organization) + reserved
        if waiting + records > most or (records == 0 and waiting >= most):
            raise Refusal(
                429,
                f"At most {most:,} records may wait at a time, and {waiting:,} do. "
                "Try again when a batch has ended.",
                code="quota_exceeded",
            )
        self._reserved[organization] = reserved + records
        try:
            yield
        finally:
            self._reserved[organization] -= records
            if not self._reserved[organization]:
                del self._reserved[organization]

    def _fact(
        self,
        principal: Principal,
        order: Order,
        file: FileId,
        batch: BatchId,
        claim: str,
        verdict: Verdict,
        objects: _Objects,
    ) -> Created:
        settings = self._parts.settings
        model = verdict.model or order.model
        if verdict.model is not None:
            price = pricing.price(verdict.model, settings.models[verdict.model], order.priority)
        else:
            price = Price("price_none", 0, 0, 0, pricing.BPS[order.priority])
        return Created(
            batch=batch,
            organization=principal.organization,
            endpoint=order.endpoint,
            priority=order.priority,
            input_file_id=file,
            input_object=objects.input,
            rejected_object=objects.rejected if verdict.rejected else None,
            completion_window=order.completion_window,
            window_s=settings.limits.completion_window_s,
            total=verdict.total,
            rejected=verdict.rejected,
            model=model,
            price=price,
            metadata=order.metadata,
            api_key_id=principal.key_id,
            result_ttl_s=order.result_ttl_s,
            claim=claim,
        )

    async def _append(self, created: Created, attempt: str, undo: contextlib.AsyncExitStack) -> BatchState:
        """Append `created`; the batch as its first `created` has it."""
        value = msgspec.json.encode(created)
        if len(value) > MAX_FACT_BYTES:
            raise refusals.invalid("metadata is too large.", "metadata")
        try:
            delivery = await self._parts.facts.try_append(
                topics.BATCHES, batch_key(created, attempt), value, self._partition(created.batch)
            )
        except Uncertain:
            # What the fact names must stay as long as the fact may turn up; the sweeper removes it.
            undo.pop_all()
            self._withdraw(created.batch, attempt)
            raise refusals.unavailable() from None
        await self._parts.model.barrier()
        state = self._parts.model.batch(created.batch)
        assert state is not None
        if state.created == created:
            return as_created(created, delivery)
        return state

    def _withdraw(self, batch: BatchId, attempt: str) -> None:
        """See to it that a batch whose creation was refused as uncertain never is, however long it takes."""
        fact = Withdrawn(batch=batch)
        task = asyncio.create_task(self._append_for_sure(fact, attempt))
        self._withdrawing[batch] = task
        task.add_done_callback(lambda _: self._withdrawing.pop(batch))

    async def _append_for_sure(self, fact: BatchFact, attempt: str) -> None:
        while True:
            with contextlib.suppress(Uncertain):
                await self._parts.facts.try_append(
                    topics.BATCHES,
                    batch_key(fact, attempt),
                    msgspec.json.encode(fact),
                    self._partition(fact.batch),
                )
                log.warning("withdrew %s, whose creation was not acknowledged", fact.batch)
                return
            await asyncio.sleep(WITHDRAW_EVERY_S)

    async def _remove(self, objects: _Objects) -> None:
        await self._parts.threads.run(self._parts.blobs.delete, objects.input)
        await self._parts.threads.run(self._parts.blobs.delete, objects.rejected)

    async def _forget_file(self, principal: Principal, file: FileId) -> None:
        fact = FileDeleted(file=file, organization=principal.organization)
        await self._parts.facts.append(topics.FILES, f"{file}:deleted", msgspec.json.encode(fact), 0)
        await self._parts.threads.run(self._parts.blobs.delete, f"uploads/{file}")

    def _partition(self, batch: BatchId) -> int:
        return topics.partition_of(batch, self._parts.settings.kafka.partitions)


def as_created(created: Created, delivery: Delivery) -> BatchState:
    """The batch at the instant of its creation, whatever has become of it since."""
    return fold(BatchState(), created, delivery.timestamp_ms)
