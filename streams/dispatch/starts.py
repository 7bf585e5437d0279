"""Which record goes into a free slot, and its way from there to its result."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import structlog

from schemas.errors import RunCode
from schemas.ids import BatchId
from schemas.settings import Settings
from streams.core.judge import Again
from streams.core.schedule import Schedule
from streams.dispatch.backlog import Backlog
from streams.dispatch.calls import BodyStore
from streams.dispatch.careful import Careful
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.loops import Loops
from streams.dispatch.partitions import Partitions
from streams.dispatch.results import Results
from streams.dispatch.runner import Runner
from streams.kafka.messages import KafkaFailed
from streams.pools.openai import OpenAIClient
from streams.pools.pool import ModelPool, Slot

REREAD_S = 0.05
"""After a read that failed."""

TOKENS_PER_BYTE = 0.25
TOKENS_PER_RECORD = 256
"""The service a record is charged with before anything is known of it."""

log = structlog.get_logger("openrelay.dispatch")


class Starts:
    """For one event loop, over the jobs, pools and schedules that the dispatcher keeps.

    `on_idle` is told of a closing job whose last running record has ended, `on_failed` of what ends the
    process.
    """

    def __init__(
        self,
        settings: Settings,
        client: OpenAIClient,
        store: BodyStore,
        *,
        jobs: Mapping[BatchId, Job],
        pools: Mapping[str, ModelPool],
        schedules: Mapping[str, Schedule],
        partitions: Partitions,
        backlog: Backlog,
        done: DoneLog,
        results: Results,
        on_idle: Callable[[Job], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._jobs = jobs
        self._pools = pools
        self._schedules = schedules
        self._partitions = partitions
        self._backlog = backlog
        self._done = done
        self._results = results
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._runner = Runner(settings.limits, client, store, done, results)
        self._runner.on_free_slot = self.pump
        self.loops = Loops(settings, self._runner, store, self.pump)
        self.careful = Careful(
            jobs,
            pools,
            backlog,
            done,
            self._runner,
            start=self._start,
            cut_off=self.loops.cut_off,
            may_start=lambda: bool(self._partitions.owned) and not (self.stopping or results.congested),
            others_wait=self._anything_waits,
            pump=self.pump,
            spawn=self.spawn,
        )
        self._runner.must_wait, self._runner.wait = self.careful.must_wait, self.careful.wait
        self.retries: list[tuple[float, int, Work, Job]] = []
        """A heap by the time from which they may run again."""
        self.stopping = False
        """Nothing new starts; running records go on."""
        self._sequence = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._weights: dict[str, float] = {}

    def configure(self, settings: Settings) -> None:
        self._runner.limits = settings.limits
        self.loops.configure(settings)
        self._weights = {organization.id: organization.weight for organization in settings.organizations}

    async def close(self) -> None:
        """Cut off what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.loops.egress.close()

    def schedule(self, job: Job) -> None:
        created, schedule = job.state.created, self._schedules.get(job.model)
        assert created is not None
        if schedule is None or job.batch in schedule or not job.lanes:
            return
        window_ms = job.state.expires_at_ms - job.state.created_at_ms
        schedule.add(
            job.batch,
            created.organization,
            created.priority,
            weight=self._weights.get(created.organization, 1.0),
            expires_at_ms=job.state.expires_at_ms,
            urgent_at_ms=job.state.expires_at_ms - window_ms // 10,
        )

    def retry_due(self, now: float) -> None:
        """Records whose wait is over wait for a slot."""
        while self.retries and self.retries[0][0] <= now:
            _, _, work, job = heapq.heappop(self.retries)
            self._retry(work, job)

    def _retry(self, work: Work, job: Job) -> None:
        if self._jobs.get(job.batch) is not job or job.closing is not None:
            return
        if job.lanes.get(work.lane.partition) is not work.lane:
            work.lane.unread(work.position, work.position)
            return
        if work.lane.runs_alone(work.position):
            self.careful.put_back(work)
            return
        job.ready.appendleft(work)
        self._backlog.bytes_waiting += work.size
        self.set_ready(job)

    def set_ready(self, job: Job) -> None:
        """A job is ready when a record waits, or when one could be read."""
        schedule = self._schedules.get(job.model)
        if schedule is not None and job.batch in schedule:
            if job.ready:
                waiting = not self._must_wait(job)
            else:
                waiting = not job.reads and bool(job.unread())
            schedule.set_ready(job.batch, bool(job.turns) or (job.closing is None and waiting))

    def _must_wait(self, job: Job) -> bool:
        """Whether every record read would be one too many between calls; plain ones are let past those."""
        created = job.state.created
        assert created is not None
        if not self.loops.full(created.organization):
            return False
        for _ in range(len(job.ready)):
            if not job.ready[0].loops:
                return False
            job.ready.rotate(-1)
        return True

    def _anything_waits(self) -> bool:
        """Whether there is a record that could start if there were slots, or is being read."""
        return any(schedule.any_ready for schedule in self._schedules.values()) or any(
            job.reads for job in self._jobs.values()
        )

    def may_start(self, job: Job) -> bool:
        """Whether a record of the job that waits, if there is one, could be started now."""
        schedule, pool = self._schedules.get(job.model), self._pools.get(job.model)
        if schedule is None or pool is None or job.batch not in schedule or self.stopping:
            return False
        if self._results.congested or (job.ready and self._must_wait(job)):
            return False
        return pool.free(self._loop.time()) > 0

    def unschedule(self, job: Job) -> None:
        schedule = self._schedules.get(job.model)
        if schedule is not None:
            schedule.remove(job.batch)

    def pump(self) -> None:
        """Start what may start now."""
        self._serve_turns(every=self.stopping or (self.careful.alone and not self.careful.handling))
        if self.stopping or not self._partitions.owned:
            return
        if self.careful:
            self.careful.begin()
        if self.careful.alone:
            return
        now, now_ms = self._loop.time(), time.time_ns() // 1_000_000
        for name, pool in self._pools.items():
            schedule = self._schedules[name]
            free = pool.free(now)
            while free and not self._results.congested:
                batch = schedule.pick(now_ms)
                if batch is None:
                    break
                job = self._jobs[batch]
                if job.turns:
                    free -= self._serve_turn(job, pool, now)
                    self.set_ready(job)
                    continue
                if not job.ready:
                    self._read_ahead(job)
                    continue
                work = self._backlog.pop(job)
                slot = pool.acquire(now, work.avoid)
                assert slot is not None, "a free slot was seen"
                free -= 1
                schedule.charge(batch, TOKENS_PER_RECORD + work.size * TOKENS_PER_BYTE, now_ms)
                self._start(job, work, pool, slot)
                if self._backlog.wants_more(job, pool.slots):
                    self._read_ahead(job)
                self.set_ready(job)

    def _serve_turns(self, *, every: bool) -> None:
        """Slots for running records of jobs that the schedule no longer knows, or of every job."""
        now = self._loop.time()
        for job in list(self.loops.wanting):
            pool, schedule = self._pools[job.model], self._schedules[job.model]
            while job.turns and (every or job.batch not in schedule) and pool.free(now):
                self._serve_turn(job, pool, now)
            if job.turns:
                self.set_ready(job)
            else:
                self.loops.wanting.discard(job)

    def _serve_turn(self, job: Job, pool: ModelPool, now: float) -> bool:
        """Give a free slot to the running record that has waited longest; False when it waits no longer."""
        turn = job.turns.popleft()
        if turn.slot.done():
            return False
        slot = pool.acquire(now, turn.avoid)
        assert slot is not None, "a free slot was seen"
        turn.slot.set_result(slot)
        schedule = self._schedules[job.model]
        if job.batch in schedule:
            tokens = TOKENS_PER_RECORD + turn.size * TOKENS_PER_BYTE
            schedule.charge(job.batch, tokens, time.time_ns() // 1_000_000)
        return True

    def _read_ahead(self, job: Job) -> None:
        async def read() -> None:
            try:
                await self._backlog.read(job)
            except KafkaFailed as error:
                log.warning("read failed, will be repeated", batch=job.batch, error=str(error))
                await asyncio.sleep(REREAD_S)
            finally:
                job.reads -= 1
            if self._jobs.get(job.batch) is not job or job.closing is not None:
                self._backlog.drop(job)
                return
            self.set_ready(job)
            self.pump()

        job.reads += 1
        self.set_ready(job)
        self.spawn(read())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_failed(task.exception())  # type: ignore[arg-type]

    def _start(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> asyncio.Task[None]:
        work.lane.start(work.position)
        if work.loops:
            self.loops.begin(job, work)
        task = self.spawn(self._run(job, work, pool, slot))
        job.running[task] = work
        task.add_done_callback(partial(self._finished, job, work, slot))
        return task

    def _finished(self, job: Job, work: Work, slot: Slot, task: asyncio.Task[None]) -> None:
        slot.release()
        job.running.pop(task, None)
        if job.closing is not None and not job.running:
            self.unschedule(job)
            self._on_idle(job)
        if work.loops:
            self.loops.end(job, work)
            for other in self._jobs.values():
                if other.ready and other.ready[0].loops:  # it may have waited for this one to end
                    self.set_ready(other)
        self.pump()

    async def _run(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> None:
        """One call of one record, or all of them, and what follows."""
        try:
            await self._done.reserved(work.lane, work.position)
            run = self.loops.run if work.loops else self._runner.call
            outcome = await run(job, work, pool, slot)
        except asyncio.CancelledError:
            if not job.window_over or self._jobs.get(job.batch) is not job:
                work.lane.abandon(work.position)
                raise
            outcome = self.loops.cut_off(job, work, RunCode.BATCH_EXPIRED, _WINDOW_CLOSED)
        if isinstance(outcome, Again):
            work.lane.abandon(work.position)
            work.not_before = self._loop.time() + outcome.wait_s
            heapq.heappush(self.retries, (work.not_before, next(self._sequence), work, job))
        else:
            self._runner.send(job, work, outcome)


_WINDOW_CLOSED = "the batch's completion window ended before this request was finished"
