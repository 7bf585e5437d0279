"""Creating a batch.

 1. A claim decides the batch's id (see `claims`). Dying here or later leaves a claim that a repeat of the
    request takes over.
 2. The input is used from here on (see `uses`), and the batch gets its own copy of it; for inline records
    that is first written as an upload of its own. Object names carry the time and the attempt. Dying leaves
    objects nobody knows, which the sweeper finds by their age.
 3. One strict pass judges every record; rejected ones go to an object beside the input.
 4. For inline records, the input becomes a file.
 5. The fact `created` is acknowledged: the batch exists, and the caller gets it. When the acknowledgement
    stays open the caller gets 503 and the batch is withdrawn (see `withdrawals`).

Of several attempts for one id the first `created` holds; an attempt that lost shows the winner's batch when
the winner's request was the same, and a conflict when it was not.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from schemas import topics
from schemas.facts import MAX_FACT_BYTES, Created, FileDeleted, batch_key
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
from services.api.quota import Quota
from services.api.refusals import Refusal
from services.api.uploads import Pending, expiry
from services.api.uses import Use
from services.api.withdrawals import Withdrawals
from services.api.writing import Uncertain
from streams.blobs import BlobMissing
from streams.core import pricing
from streams.core.lifecycle import BatchState, fold
from streams.crashpoints import passing

PENDING_TTL_S = 3_600


class Source(msgspec.Struct, frozen=True):
    """Where the records come from: a file that exists, or a body and where its items lie."""

    file: FileId | None
    body: Spool
    items: list[tuple[int, int]]


class _Attempt(msgspec.Struct, frozen=True):
    """What one attempt makes. `pending` is an inline input before it is a file."""

    id: str
    batch: BatchId
    file: FileId
    inline: bool
    pending: str

    @property
    def input(self) -> str:
        return f"batches/{self.batch}/input-{self.id}.jsonl"

    @property
    def rejected(self) -> str:
        return f"batches/{self.batch}/rejected-{self.id}.jsonl"


class Creation:
    def __init__(self, parts: Parts) -> None:
        partitions = parts.settings.kafka.partitions
        self._parts = parts
        self._claims = Claims(parts.model, parts.facts, partitions)
        self._scopes = Locks()
        self._quota = Quota(parts.settings.limits.max_waiting_records, parts.model.waiting_records)
        self._withdrawals = Withdrawals(parts.model, parts.facts, partitions)

    async def create(self, principal: Principal, order: Order, scope: Scope, source: Source) -> BatchState:
        """The batch of this request: new, or as it is now when the request was sent before."""
        async with self._scopes.hold(scope.name):
            file = source.file or self._parts.uploads.new_file()
            claim = await self._claims.settle(scope, file)
            if self._withdrawals.concerns(claim.batch):
                raise refusals.unavailable()
            state = self._parts.model.batch(claim.batch)
            if state is not None and state.exists:
                return self._same_request(state, scope)
            attempt = _Attempt(
                id=f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}",
                batch=claim.batch,
                file=file,
                inline=source.file is None,
                pending=Pending(file, expiry(PENDING_TTL_S)).name,
            )
            return await self._attempt(principal, order, scope, source, attempt, claim.claim)

    async def close(self) -> None:
        await self._withdrawals.close()

    async def _attempt(
        self,
        principal: Principal,
        order: Order,
        scope: Scope,
        source: Source,
        attempt: _Attempt,
        claim: str,
    ) -> BatchState:
        discard = True
        uses = self._parts.uses
        use = Use(attempt.file, attempt.batch, attempt.id)
        try:
            self._quota.check(principal.organization)
            if source.file is not None:
                self._usable(principal, source.file)
                await uses.begin(use)
            verdict = await self._judge(principal, order, source, attempt)
            if source.file is not None:
                await uses.confirm(use)
            with self._quota.hold(principal.organization, verdict.total - verdict.rejected):
                if attempt.inline:
                    uses.announce(use)
                    ttl_s = self._parts.settings.limits.file_ttl_s
                    await self._parts.uploads.register(
                        attempt.pending, attempt.file, principal.organization, ttl_s
                    )
                created = self._fact(principal, order, verdict, attempt, claim)
                # From here on the batch may exist, and what the fact names has to stay.
                discard = False
                passing("api.creating")
                mine = await self._append(created, attempt)
                state = await self._seen(mine, scope)
            if state.withdrawn:
                raise refusals.unavailable()
            if state.created == created:
                return mine
            discard = True
            return self._same_request(state, scope)
        finally:
            if discard:
                await uses.release(use)
                await self._discard(principal.organization, attempt)

    async def _judge(self, principal: Principal, order: Order, source: Source, attempt: _Attempt) -> Verdict:
        settings, threads = self._parts.settings, self._parts.threads
        if source.file is None:
            job = LayOut(attempt.pending, order.endpoint, source.items)
            await self._parts.validation.lay_out(principal.organization, job, await source.body.descriptor())
            name = attempt.pending
        else:
            name = self._usable(principal, source.file)
        try:
            await threads.run(self._parts.blobs.copy, name, attempt.input)
        except BlobMissing:
            # Deleted between the look and the copy.
            raise refusals.not_found() from None
        verdict = await self._parts.validation.check(
            principal.organization,
            Check(
                input_object=attempt.input,
                rejected_object=attempt.rejected,
                endpoint=order.endpoint,
                models=list(settings.models),
                workflows_enabled="workflows" in principal.features,
                egress=settings.egress,
                limits=settings.limits,
            ),
        )
        if verdict.total == 0:
            raise refusals.invalid("The file holds no record.", "input_file_id", "empty_file")
        return verdict

    def _usable(self, principal: Principal, file: FileId) -> str:
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

    def _fact(
        self, principal: Principal, order: Order, verdict: Verdict, attempt: _Attempt, claim: str
    ) -> Created:
        settings = self._parts.settings
        if verdict.model is not None:
            price = pricing.price(verdict.model, settings.models[verdict.model], order.priority)
        else:
            # Nothing was accepted, so nothing will be billed.
            price = Price("price_none", 0, 0, 0, pricing.BPS[order.priority])
        created = Created(
            batch=attempt.batch,
            organization=principal.organization,
            endpoint=order.endpoint,
            priority=order.priority,
            input_file_id=attempt.file,
            input_object=attempt.input,
            rejected_object=attempt.rejected if verdict.rejected else None,
            completion_window=order.completion_window,
            window_s=settings.limits.completion_window_s,
            total=verdict.total,
            rejected=verdict.rejected,
            model=verdict.model or order.model,
            price=price,
            metadata=order.metadata,
            api_key_id=principal.key_id,
            result_ttl_s=order.result_ttl_s,
            claim=claim,
        )
        if len(msgspec.json.encode(created)) > MAX_FACT_BYTES:
            raise refusals.invalid("metadata is too large.", "metadata")
        return created

    async def _append(self, created: Created, attempt: _Attempt) -> BatchState:
        """Append `created`; the batch at the instant of its creation, whatever becomes of it."""
        try:
            delivery = await self._parts.facts.try_append(
                topics.BATCHES,
                batch_key(created, attempt.id),
                msgspec.json.encode(created),
                topics.partition_of(created.batch, self._parts.settings.kafka.partitions),
            )
        except Uncertain:
            self._withdrawals.begin(created, forget_input=attempt.inline)
            raise refusals.unavailable() from None
        return fold(BatchState(), created, delivery.timestamp_ms)

    async def _seen(self, mine: BatchState, scope: Scope) -> BatchState:
        """The batch as everybody sees it, now that this attempt's `created` is in the log."""
        assert mine.created is not None
        try:
            await self._parts.model.barrier()
        except Refusal:
            if scope.repeats:
                # Whether another attempt was first cannot be told now; a repeat of the request will show it.
                raise
            return mine
        state = self._parts.model.batch(mine.created.batch)
        assert state is not None
        return state

    def _same_request(self, state: BatchState, scope: Scope) -> BatchState:
        """The batch an earlier request created, provided it was this request."""
        assert state.created is not None
        winner = self._claims.winner(state.created.batch)
        if winner is None or winner.body_sha256 != scope.body_sha256:
            raise Refusal(
                409,
                "This Idempotency-Key was used with another request body.",
                code="idempotency_conflict",
                param="Idempotency-Key",
            )
        return state

    async def _discard(self, organization: OrganizationId, attempt: _Attempt) -> None:
        """Remove what an attempt that came to nothing has made."""
        uploads = self._parts.uploads
        await uploads.discard(attempt.input)
        await uploads.discard(attempt.rejected)
        if not attempt.inline:
            return
        await uploads.discard(attempt.pending)
        if await uploads.may_exist(f"uploads/{attempt.file}"):
            fact = FileDeleted(file=attempt.file, organization=organization)
            await self._parts.facts.append(
                topics.FILES, f"{attempt.file}:deleted", msgspec.json.encode(fact), 0
            )
            await uploads.discard(f"uploads/{attempt.file}")
