"""One call of one record: from a slot to its result, or to another try."""

from __future__ import annotations

import asyncio
import random

import structlog

from schemas.records import Answered, Failed
from schemas.settings import Limits
from streams.core.judge import Again, Outcome, Reply, Server, judge
from streams.dispatch.calls import BodyStore, body_for, result_of
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.results import Results
from streams.kafka.messages import Delivery
from streams.pools.endpoint import Endpoint
from streams.pools.openai import OpenAIClient
from streams.pools.pool import ModelPool, Slot

log = structlog.get_logger("openrelay.dispatch")


class Runner:
    """Stateless but for what it was given; any number of calls at once."""

    def __init__(
        self, limits: Limits, client: OpenAIClient, store: BodyStore, done: DoneLog, results: Results
    ) -> None:
        self.limits = limits
        self._client = client
        self._store = store
        self._done = done
        self._results = results
        self._loop = asyncio.get_running_loop()

    async def call(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> Answered | Failed | Again:
        """Call the model, give the slot back; the record's result, or when to try again."""
        endpoint, created = slot.endpoint, job.state.created
        assert created is not None
        sent_at = self._loop.time()
        key_accepted = False
        try:
            body = body_for(endpoint, await self._store.request(work.request))
            outcome = await self._client.call(
                endpoint, created.endpoint, body, timeout_s=self.limits.request_time_limit_s
            )
            if isinstance(outcome, Reply) and outcome.status == 403:
                key_accepted = await self._client.key_accepted(endpoint)
        finally:
            slot.release()
        server, record = judge(
            outcome,
            endpoint=created.endpoint,
            attempts=work.attempts,
            max_attempts=self.limits.max_attempts,
            backoff_s=self.limits.retry_backoff_s,
            jitter=random.random(),
            key_accepted=key_accepted,
        )
        self._report(pool, endpoint, server, outcome, sent_at)
        if isinstance(record, Again):
            work.attempts += record.attempt
            work.avoid = endpoint
            return record
        renamed = endpoint.remote_model is not None
        return await result_of(work, record, self._store, model=pool.model, renamed=renamed)

    def send(self, job: Job, work: Work, result: Answered | Failed) -> asyncio.Future[Delivery]:
        """Put the record's result on its way; it is finished once that is acknowledged."""
        lane, position = work.lane, work.position

        def acknowledged(upto: int) -> None:
            lane.finish(position, upto)
            if job.lanes.get(lane.partition) is lane:
                self._done.changed(lane)

        return self._results.send(job.batch, result, acknowledged)

    def _report(
        self, pool: ModelPool, endpoint: Endpoint, server: Server, outcome: Outcome, sent_at: float
    ) -> None:
        now = self._loop.time()
        was_out_until = endpoint.out_until
        endpoint.report(server, sent_at=sent_at, now=now, alone=pool.in_service(now) <= 1)
        if endpoint.out_until != was_out_until:
            log.warning(
                "endpoint out",
                endpoint=endpoint.base_url,
                seconds=round(endpoint.out_until - now, 1),
                reason=f"status {outcome.status}" if isinstance(outcome, Reply) else repr(outcome),
                misconfigured=endpoint.misconfigured,
            )
