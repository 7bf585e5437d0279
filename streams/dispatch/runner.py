"""One call of one record: from a slot to its result, or to another try."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from schemas.records import INLINE_BODY_BYTES, Answered, Failed, Ref, Step
from schemas.settings import Limits
from streams import metrics
from streams.core.answers import Answer
from streams.core.judge import Again, End, Outcome, Reply, Server, foreign_404, judge
from streams.crashpoints import passing
from streams.dispatch.calls import BodyStore, body_for, named, result_of
from streams.dispatch.done import WRITE_SOON_S, DoneLog
from streams.dispatch.jobs import Job, Tries, Work
from streams.dispatch.large import Large
from streams.dispatch.lull import Lull
from streams.dispatch.memory import Memory
from streams.dispatch.results import Results
from streams.dispatch.watch import count_call
from streams.kafka.messages import Delivery
from streams.pools.endpoint import Endpoint
from streams.pools.openai import LargeBody, OpenAIClient
from streams.pools.pool import ModelPool, Slot

log = structlog.get_logger("openrelay.dispatch")


class Runner:
    """Stateless but for what it was given; any number of calls at once."""

    def __init__(
        self, limits: Limits, client: OpenAIClient, store: BodyStore, done: DoneLog, results: Results
    ) -> None:
        self.limits = limits
        self.on_free_slot: Callable[[], None] = lambda: None
        """Called when a slot is free and its answer still has to be read."""
        self.must_wait: Callable[[Work], bool] = lambda work: False
        """Whether what has come for a record is not handled yet, but after `wait`."""
        self.wait: Callable[[Job, Work], Awaitable[None]]
        self._client = client
        self._store = store
        self._done = done
        self._results = results
        self._large = Memory()
        self._lull = Lull()
        self._loop = asyncio.get_running_loop()

    async def call(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> Answered | Failed | Again:
        """Run a record that is one call; its result, or when to try again."""
        passing("dispatch.calling", work.request.custom_id)
        with self.large(job) as sending, self.large(job) as large:
            body = await self.body(work, slot, sending)
            end = await self.ask(job, work, work, pool, slot, body, large)
            passing("dispatch.answered", work.request.custom_id)
            if not isinstance(end, Again):
                return await result_of(work, end, self._store)
        if end.attempt:
            work.lane.failed(work.position, work.attempts)
            if job.lanes.get(work.lane.partition) is work.lane:
                self._done.changed(work.lane, WRITE_SOON_S)
        return end

    def large(self, job: Job) -> Large:
        """Room for the body or the answer of one call of the job, beyond what every call may hold."""
        created = job.state.created
        assert created is not None
        return Large(self._large, created.organization, job.model)

    async def body(self, work: Work, slot: Slot, sending: Large) -> bytes | LargeBody:
        """The record's body, as the slot's endpoint wants it; a large one is held until it is sent."""
        ref = work.request.ref
        if not isinstance(ref, Ref):
            return body_for(slot.endpoint, await self._store.request(work.request))
        await sending.wait(ref.length)
        return LargeBody(body_for(slot.endpoint, await self._store.request(work.request)), sending.give)

    async def ask(
        self,
        job: Job,
        work: Work,
        tries: Tries,
        pool: ModelPool,
        slot: Slot,
        body: bytes | LargeBody,
        large: Large,
        fault: Callable[[Answer], str] | None = None,
    ) -> End | Again:
        """Call the model for a record, give the slot back; how the call ended, or when to try again.

        `tries` are those of this call, which may be one of several. `body` is what `slot.endpoint` is sent
        (`body`, `body_for`); `large` holds a large answer.
        `fault` says why an answer that is one still cannot be used, empty when it can.
        """
        endpoint, created = slot.endpoint, job.state.created
        assert created is not None
        sent_at = self._loop.time()
        key_accepted = no_such_route = False
        try:
            outcome = await self._client.call(
                endpoint,
                created.endpoint,
                body,
                timeout_s=self.limits.request_time_limit_s,
                free_bytes=INLINE_BODY_BYTES,
                room=large.wait,
            )
            if isinstance(outcome, Reply) and outcome.status == 403:
                key_accepted = await self._client.key_accepted(endpoint)
            if foreign_404(outcome):
                no_such_route = await self._client.lists_no_models(endpoint)
        finally:
            slot.release()
        if isinstance(outcome, Reply) and 200 <= outcome.status < 300:
            self.on_free_slot()
            await self._lull.wait()
        if self.must_wait(work):
            await self.wait(job, work)
        passing("dispatch.called")
        server, end = judge(
            outcome,
            endpoint=created.endpoint,
            attempts=tries.attempts,
            max_attempts=self.limits.max_attempts,
            backoff_s=self.limits.retry_backoff_s,
            jitter=random.random(),
            key_accepted=key_accepted,
            no_such_route=no_such_route,
            fault=fault,
        )
        self._report(pool, endpoint, server, outcome, sent_at)
        if isinstance(end, Again):
            metrics.RETRIES.labels(pool.model).inc()
            tries.attempts += end.attempt
            tries.avoid = endpoint
            if server is Server.REFUSING and pool.has_other(endpoint, self._loop.time()):
                return Again(0.0, attempt=False)  # it is this server that asks for time
            return end
        return named(end, endpoint, pool.model)

    def send(self, job: Job, work: Work, result: Answered | Failed) -> asyncio.Future[Delivery]:
        """Put the record's result on its way; it is finished once that is acknowledged."""
        lane, position = work.lane, work.position

        def acknowledged(upto: int) -> None:
            passing("dispatch.acknowledged")
            lane.finish(position, upto)
            if job.lanes.get(lane.partition) is lane:
                self._done.changed(lane)

        return self._results.send(job.batch, result, acknowledged)

    async def note(self, job: Job, work: Work, step: Step) -> None:
        """Write down that a workflow record has finished a step; returns when that is acknowledged."""
        lane, position = work.lane, work.position

        def acknowledged(upto: int) -> None:
            lane.wrote_step(position, upto - 1)
            if job.lanes.get(lane.partition) is lane:
                self._done.changed(lane)

        await self._results.send(job.batch, step, acknowledged)

    def _report(
        self, pool: ModelPool, endpoint: Endpoint, server: Server, outcome: Outcome, sent_at: float
    ) -> None:
        now = self._loop.time()
        count_call(pool.model, outcome, now - sent_at)
        was_out_until = endpoint.out_until
        endpoint.report(
            server,
            sent_at=sent_at,
            now=now,
            alone=not pool.has_other(endpoint, now),
            retry_after_s=outcome.retry_after_s if isinstance(outcome, Reply) else None,
        )
        if endpoint.out_until != was_out_until:
            log.warning(
                "endpoint out",
                endpoint=endpoint.pool.address,
                seconds=round(endpoint.out_until - now, 1),
                reason=f"status {outcome.status}" if isinstance(outcome, Reply) else repr(outcome),
                misconfigured=endpoint.misconfigured,
            )
