"""The dispatcher's loop: facts, partitions, slots and results, joined in one event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import structlog

from schemas import topics
from schemas.errors import RunCode
from schemas.facts import BatchFact
from schemas.ids import BatchId
from schemas.records import Answered, Closed, Failed
from schemas.settings import Settings
from streams import metrics
from streams.blobs.port import Blobs
from streams.core.judge import Again
from streams.core.lanes import Lane
from streams.core.lifecycle import BatchState, OpenBatches, ended
from streams.core.schedule import Schedule
from streams.dispatch import health
from streams.dispatch.backlog import Backlog
from streams.dispatch.calls import BodyStore
from streams.dispatch.careful import Careful
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.loops import Loops
from streams.dispatch.partitions import Partitions
from streams.dispatch.results import Results
from streams.dispatch.runner import Runner
from streams.dispatch.watch import Watch
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.follow import Follower
from streams.kafka.membership import Membership
from streams.kafka.messages import KafkaFailed, Message
from streams.kafka.producer import AsyncProducer
from streams.pools.openai import OpenAIClient
from streams.pools.pool import ModelPool, Slot

GROUP = "dispatch"
TICK_S = 0.05
POSITIONS_EVERY_TICKS = 20

TOKENS_PER_BYTE = 0.25
TOKENS_PER_RECORD = 256
"""The service a record is charged with before anything is known of it."""

log = structlog.get_logger("openrelay.dispatch")

_decode_fact = msgspec.json.Decoder(BatchFact).decode


class Dispatcher:
    """One dispatcher process. Construct it inside the running loop."""

    def __init__(self, settings: Settings, instance: str, blobs: Blobs) -> None:
        self._settings = settings
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self._producer = AsyncProducer(settings.kafka, f"openrelay-{instance}-results")
        self._done = DoneLog(settings.kafka, instance, self._producer, self._fail)
        self._results = Results(settings.kafka, self._producer, self._fail)
        self._partitions = Partitions(Admin(settings.kafka, f"openrelay-{instance}-admin"), self._done)
        self._backlog = Backlog(settings.kafka, f"openrelay-{instance}-backlog")
        self._follower = Follower(
            settings.kafka, f"openrelay-{instance}-facts", [topics.BATCHES], self._from_follower
        )
        self._membership = Membership(
            settings.kafka,
            GROUP,
            instance,
            [f"^{topics.REQUESTS_PREFIX.replace('.', chr(92) + '.')}.*"],
            on_assigned=self._from_member(self._assigned),
            on_revoked=self._from_member(self._revoked),
            on_lost=self._from_member(self._lost),
            positions=self._partitions.positions,
            on_failed=self._from_member_failure,
        )
        self._batches = OpenBatches(ended)
        self._jobs: dict[BatchId, Job] = {}
        self._pools: dict[str, ModelPool] = {}
        self._schedules: dict[str, Schedule] = {}
        self._client = OpenAIClient()
        store = BodyStore(blobs)
        self._runner = Runner(settings.limits, self._client, store, self._done, self._results)
        self._loops = Loops(settings, self._runner, store, self._pump)
        self._runner.on_free_slot = self._pump
        self._careful = Careful(
            self._jobs,
            self._pools,
            self._backlog,
            self._done,
            self._runner,
            self._record,
            self._loops.cut_off,
        )
        self._retries: list[tuple[float, int, Work, Job]] = []
        self._watch = Watch(self._jobs, self._pools, self._retries, self._backlog, self._may_start)
        self._sequence = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._apply(settings)

    def configure(self, settings: Settings) -> None:
        """Take new settings: endpoints and models appear and vanish without a restart."""
        self._apply(settings)
        log.info("settings read again", models=len(settings.models))
        self._spawn(self._redivide())

    def _apply(self, settings: Settings) -> None:
        self._settings = settings
        self._runner.limits = settings.limits
        self._loops.configure(settings)
        self._models = {topics.requests_name(model): model for model in settings.models}
        self._weights = {organization.id: organization.weight for organization in settings.organizations}
        for name, model in settings.models.items():
            if name in self._pools:
                self._pools[name].configure(model.pools)
            else:
                self._pools[name] = ModelPool(name, model.pools)
                self._schedules[name] = Schedule()
        for name in self._pools.keys() - settings.models.keys():
            self._pools[name].configure(())
        for job in self._jobs.values():
            self._name_model(job)
        self._partitions.divide(
            {topics.requests_name(name): self._pools[name].least_slots for name in settings.models}
        )
        self._resize()

    async def run(self, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        """Dispatch until `stopping`, then let running calls finish and hand the partitions over.

        Raises KafkaFailed when the log cannot be reached any more.
        """
        await asyncio.to_thread(self._follower.start)
        await asyncio.to_thread(self._follower.wait_caught_up, 120.0)
        self._membership.start()
        housekeeping = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(health.watch(self._pools, self._client)),
            asyncio.create_task(health.fit(self._pools, self._client)),
        ]
        ready()
        stop = asyncio.create_task(stopping.wait())
        try:
            ends: set[asyncio.Future[Any]] = {stop, self._failed, *housekeeping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            for task in [*housekeeping, stop]:
                task.cancel()
            results = await asyncio.gather(*housekeeping, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            if self._failed.done():
                self._failed.result()
            await asyncio.to_thread(self._membership.stop)
            if self._failed.done():
                self._failed.result()
        finally:
            await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._follower.stop)
        await self._client.close()
        await self._loops.egress.close()
        await self._producer.close()
        await asyncio.to_thread(self._backlog.close)

    # ---- from other threads ----

    def _from_follower(self, messages: list[Message]) -> None:
        """In the follower's thread: apply in the loop, and return when it is done."""
        applied: Future[None] = Future()

        def apply() -> None:
            try:
                for message in messages:
                    self._fact(message)
                self._pump()
            except BaseException as error:
                applied.set_exception(error)
            else:
                applied.set_result(None)

        self._loop.call_soon_threadsafe(apply)
        applied.result(timeout=60)

    def _from_member(
        self, handle: Callable[[list[TopicPartition]], Awaitable[None]]
    ) -> Callable[[list[TopicPartition]], None]:
        """In the membership's thread: run the handler in the loop and wait for it."""

        async def call(partitions: list[TopicPartition]) -> None:
            await handle(partitions)

        def blocking(partitions: list[TopicPartition]) -> None:
            asyncio.run_coroutine_threadsafe(call(partitions), self._loop).result()

        return blocking

    def _from_member_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    # ---- facts ----

    def _fact(self, message: Message) -> None:
        if message.value is None:
            return
        fact = _decode_fact(message.value)
        state = self._batches.fold(fact, message.timestamp_ms)
        if state is None:
            return
        if ended(state):
            self._drop(fact.batch)
        else:
            self._consider(fact.batch, state)

    def _consider(self, batch: BatchId, state: BatchState) -> None:
        if state.settled is not None:
            self._drop(batch)
            return
        if state.created is None or state.enqueued is None or not state.enqueued.extents:
            return
        job = self._jobs.get(batch)
        if job is None:
            job = self._jobs[batch] = Job(batch, state)
            self._name_model(job)
        job.state = state
        for partition, runs in state.enqueued.extents.items():
            self._partitions.note_end((state.enqueued.topic, partition), runs[-1][1] + 1)
        self._open_lanes(job)
        if state.cancelled:
            self._begin_close(job, "cancelled")

    def _name_model(self, job: Job) -> None:
        """Which model it is; the settings may come to know it later than the batch is there."""
        enqueued = job.state.enqueued
        assert enqueued is not None
        job.model = job.model or self._models.get(enqueued.topic, "")

    def _drop(self, batch: BatchId) -> None:
        """The batch has its verdicts: stop what still runs, forget it, remove its done-sets."""
        job = self._jobs.pop(batch, None)
        if job is None:
            return
        self._unschedule(job)
        self._backlog.drop(job)
        for task in job.running:
            task.cancel()
        for lane in self._partitions.forget(job):
            self._careful.discard(lane)
            self._done.remove(lane)

    # ---- partitions ----

    async def _assigned(self, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        await self._partitions.take(partitions)
        self._take_up()
        log.info("partitions assigned", count=len(partitions), owned=len(self._partitions.owned))

    async def _redivide(self) -> None:
        """The settings are others: partitions may follow other leads now, from us or to us."""
        await self._leave(self._disown())
        await self._partitions.follow(self._settings.limits.drain_s)
        self._take_up()

    def _take_up(self) -> None:
        self._resize()
        for job in list(self._jobs.values()):
            self._open_lanes(job)
        self._pump()

    async def _revoked(self, partitions: list[TopicPartition]) -> None:
        """Stop starting there, let calls finish up to a bound, leave clean done-sets behind.

        Our share of the slots stays ours so long: records that are more than one call go on with it.
        """
        await self._leave(self._disown(partitions))

    async def _leave(self, lanes: list[Lane]) -> None:
        running = [task for task, work in self._running_in(lanes)]
        if running:
            await asyncio.wait(running, timeout=self._settings.limits.drain_s)
            late = [task for task in running if not task.done()]
            for task in late:
                task.cancel()
            if late:
                log.warning("calls given up at hand-over", count=len(late))
                await asyncio.wait(late)
        self._resize()
        await self._results.drained()
        if not self._failed.done():
            await self._done.leave(lanes)
            for lane in lanes:
                self._done.forget(lane)

    async def _lost(self, partitions: list[TopicPartition]) -> None:
        """Taken away, because we or the broker were silent: nothing starts until they are given again.

        Calls that run go on. If somebody else makes them too, the arbiter takes the first result.
        """
        self._partitions.park(self._disown(partitions))
        self._resize()
        log.warning("partitions lost", count=len(partitions))

    def _disown(self, partitions: Iterable[TopicPartition] = ()) -> list[Lane]:
        """Stop starting in what is not ours without these partitions, or with other divisions; its lanes."""
        gone = self._partitions.give_up(partitions)
        given_up = []
        for job in self._jobs.values():
            for partition, lane in list(job.lanes.items()):
                if (lane.topic, partition) in gone:
                    del job.lanes[partition]
                    job.closed.discard(partition)
                    self._backlog.drop(job, lane)
                    self._careful.discard(lane)
                    given_up.append(lane)
            self._set_ready(job)
        return given_up

    def _running_in(self, lanes: list[Lane]) -> list[tuple[asyncio.Task[None], Work]]:
        wanted = set(lanes)
        return [
            (task, work)
            for job in self._jobs.values()
            for task, work in job.running.items()
            if work.lane in wanted
        ]

    def _resize(self) -> None:
        """Our share of every limit follows the partitions the group has given us."""
        for name, pool in self._pools.items():
            pool.own(*self._partitions.division(topics.requests_name(name)))

    def _open_lanes(self, job: Job) -> None:
        """Lanes for the partitions of ours that hold records of the job and have none yet."""
        enqueued = job.state.enqueued
        assert enqueued is not None
        for partition in enqueued.extents:
            if partition in job.lanes or (enqueued.topic, partition) not in self._partitions.owned:
                continue
            lane = self._partitions.open_lane(job, partition)
            if lane.crashes and not lane.acked_upto:
                metrics.CRASHED_LANES.inc()
                log.warning(
                    "records were running at a crash",
                    batch=job.batch,
                    partition=partition,
                    crashes=lane.crashes,
                    records=len(lane.suspects),
                )
                self._done.reserve(lane)
            if lane.careful:
                self._careful.add(lane)
        if job.closing is None:
            self._into_schedule(job)
        elif not job.running:
            self._send_closed(job)
        self._set_ready(job)

    def _into_schedule(self, job: Job) -> None:
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

    # ---- choosing and starting ----

    async def _tick(self) -> None:
        """Everything that is due by the clock: retries, endpoints that come back, expiry."""
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            while self._retries and self._retries[0][0] <= now:
                _, _, work, job = heapq.heappop(self._retries)
                self._retry(work, job)
            now_ms = time.time_ns() // 1_000_000
            for job in list(self._jobs.values()):
                if now_ms >= job.state.expires_at_ms:
                    self._expire(job)
            if tick % POSITIONS_EVERY_TICKS == 0:
                self._partitions.note_positions(self._jobs.values())
                self._watch.look(
                    now,
                    self._settings.limits.stuck_after_s,
                    unacked_bytes=self._results.unacked_bytes,
                )
            self._pump()

    def _retry(self, work: Work, job: Job) -> None:
        if self._jobs.get(job.batch) is not job or job.closing is not None:
            return
        if job.lanes.get(work.lane.partition) is not work.lane:
            work.lane.unread(work.position, work.position)
            return
        job.ready.appendleft(work)
        self._backlog.bytes_waiting += work.size
        self._set_ready(job)

    def _set_ready(self, job: Job) -> None:
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
        if not self._loops.full(created.organization):
            return False
        for _ in range(len(job.ready)):
            if not job.ready[0].loops:
                return False
            job.ready.rotate(-1)
        return True

    def _may_start(self, job: Job) -> bool:
        """Whether a record of the job that waits, if there is one, could be started now."""
        schedule, pool = self._schedules.get(job.model), self._pools.get(job.model)
        if schedule is None or pool is None or job.batch not in schedule or self._careful or self._stopping:
            return False
        if self._results.congested or (job.ready and self._must_wait(job)):
            return False
        return pool.free(self._loop.time()) > 0

    def _unschedule(self, job: Job) -> None:
        schedule = self._schedules.get(job.model)
        if schedule is not None:
            schedule.remove(job.batch)

    def _pump(self) -> None:
        """Start what may start now."""
        self._serve_turns(every=self._stopping or bool(self._careful))
        if self._stopping or not self._partitions.owned:
            return
        if self._careful:
            if not any(job.running for job in self._jobs.values()):
                self._careful.start(self._spawn, self._pump)
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
                    self._set_ready(job)
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
                if self._backlog.wants_more(job):
                    self._read_ahead(job)
                self._set_ready(job)

    def _serve_turns(self, *, every: bool) -> None:
        """Slots for running records of jobs that the schedule no longer knows, or of every job."""
        now = self._loop.time()
        for job in list(self._loops.wanting):
            pool, schedule = self._pools[job.model], self._schedules[job.model]
            while job.turns and (every or job.batch not in schedule) and pool.free(now):
                self._serve_turn(job, pool, now)
            if job.turns:
                self._set_ready(job)
            else:
                self._loops.wanting.discard(job)

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
                await asyncio.sleep(TICK_S)
            finally:
                job.reads -= 1
            if self._jobs.get(job.batch) is not job or job.closing is not None:
                self._backlog.drop(job)
                return
            self._set_ready(job)
            self._pump()

        job.reads += 1
        self._set_ready(job)
        self._spawn(read())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())  # type: ignore[arg-type]

    def _start(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> None:
        work.lane.start(work.position)
        if work.loops:
            self._loops.begin(job, work)
        task = self._spawn(self._run(job, work, pool, slot))
        job.running[task] = work
        task.add_done_callback(partial(self._finished, job, work, slot))

    def _finished(self, job: Job, work: Work, slot: Slot, task: asyncio.Task[None]) -> None:
        slot.release()
        job.running.pop(task, None)
        if job.closing is not None and not job.running:
            self._send_closed(job)
        if work.loops:
            self._loops.end(job, work)
            for other in self._jobs.values():
                if other.ready and other.ready[0].loops:  # it may have waited for this one to end
                    self._set_ready(other)
        self._pump()

    # ---- one record ----

    async def _record(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> Answered | Failed | Again:
        """Run one record from a slot on."""
        how = self._loops.run if work.loops else self._runner.call
        return await how(job, work, pool, slot)

    async def _run(self, job: Job, work: Work, pool: ModelPool, slot: Slot) -> None:
        """One call of one record, or all of them, and what follows."""
        try:
            await self._done.reserved(work.lane, work.position)
            outcome = await self._record(job, work, pool, slot)
        except asyncio.CancelledError:
            if not job.window_over or self._jobs.get(job.batch) is not job:
                work.lane.abandon(work.position)
                raise
            outcome = self._loops.cut_off(job, work, RunCode.BATCH_EXPIRED, _WINDOW_CLOSED)
        if isinstance(outcome, Again):
            work.lane.abandon(work.position)
            work.not_before = self._loop.time() + outcome.wait_s
            heapq.heappush(self._retries, (work.not_before, next(self._sequence), work, job))
        else:
            self._runner.send(job, work, outcome)

    # ---- ends ----

    def _begin_close(self, job: Job, reason: str) -> None:
        if job.closing is not None:
            return
        job.closing = reason
        job.stopped.set()
        self._unschedule(job)
        self._backlog.drop(job)
        if not job.running:
            self._send_closed(job)

    def _expire(self, job: Job) -> None:
        """The window is over: running calls are stopped, their records end as expired."""
        if job.window_over:
            return
        job.window_over = True
        self._begin_close(job, "cancelled" if job.state.cancelled else "expired")
        for task in list(job.running):
            task.cancel()

    def _send_closed(self, job: Job) -> None:
        """Behind the last result of each of our partitions, by the same producer."""
        assert job.closing is not None
        for partition, lane in job.lanes.items():
            if partition in job.closed:
                continue
            job.closed.add(partition)
            closed = Closed(batch=job.batch, partition=lane.partition, reason=job.closing)
            self._results.send(job.batch, closed, lambda upto: None)


_WINDOW_CLOSED = "the batch's completion window ended before this request was finished"
