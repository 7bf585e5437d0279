"""One dispatcher: what the facts and the group say, joined in one event loop, and the ends of batches."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import structlog

from schemas import topics
from schemas.facts import BatchFact
from schemas.ids import BatchId
from schemas.records import Closed
from schemas.settings import Settings
from streams import metrics
from streams.blobs.port import Blobs
from streams.core.lanes import Lane
from streams.core.lifecycle import BatchState, OpenBatches, ended
from streams.core.schedule import Schedule
from streams.dispatch import health
from streams.dispatch.backlog import Backlog
from streams.dispatch.calls import BodyStore
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.partitions import Partitions
from streams.dispatch.results import Results
from streams.dispatch.starts import Starts
from streams.dispatch.watch import Watch
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.follow import Follower
from streams.kafka.membership import Membership
from streams.kafka.messages import Message
from streams.kafka.producer import AsyncProducer
from streams.pools.openai import OpenAIClient
from streams.pools.pool import ModelPool

GROUP = "dispatch"
TICK_S = 0.05
POSITIONS_EVERY_TICKS = 20

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
        admin = Admin(settings.kafka, f"openrelay-{instance}-admin")
        self._partitions = Partitions(admin, self._done)
        self._backlog = Backlog(settings.kafka, f"openrelay-{instance}-backlog")
        self._follower = Follower(
            settings.kafka, f"openrelay-{instance}-facts", [topics.BATCHES], self._from_follower
        )
        self._membership = Membership(
            settings.kafka,
            GROUP,
            instance,
            lambda: admin.topics(topics.REQUESTS_PREFIX),
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
        self._starts = Starts(
            settings,
            self._client,
            BodyStore(blobs),
            jobs=self._jobs,
            pools=self._pools,
            schedules=self._schedules,
            partitions=self._partitions,
            backlog=self._backlog,
            done=self._done,
            results=self._results,
            on_idle=self._send_closed,
            on_failed=self._fail,
        )
        self._watch = Watch(
            self._jobs, self._pools, self._starts.retries, self._backlog, self._starts.may_start
        )
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._apply(settings)

    def configure(self, settings: Settings) -> None:
        """Take new settings: endpoints and models appear and vanish without a restart."""
        self._apply(settings)
        log.info("settings read again", models=len(settings.models))
        self._starts.spawn(self._redivide())

    def _apply(self, settings: Settings) -> None:
        self._settings = settings
        self._starts.configure(settings)
        for name, model in settings.models.items():
            if name in self._pools:
                self._pools[name].configure(model.pools)
            else:
                self._pools[name] = ModelPool(name, model.pools)
                self._schedules[name] = Schedule()
        for name in self._pools.keys() - settings.models.keys():
            self._pools[name].configure(())
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
            self._starts.stopping = True
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
        await self._starts.close()
        await asyncio.to_thread(self._follower.stop)
        await self._client.close()
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
                self._starts.pump()
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
            assert state.created.model is not None, "its records name one"
            job = self._jobs[batch] = Job(batch, state, state.created.model)
        job.state = state
        for partition, runs in state.enqueued.extents.items():
            self._partitions.note_end((state.enqueued.topic, partition), runs[-1][1] + 1)
        self._open_lanes(job)
        if state.cancelled:
            self._begin_close(job, "cancelled")

    def _drop(self, batch: BatchId) -> None:
        """The batch has its verdicts: stop what still runs, forget it, remove its done-sets."""
        job = self._jobs.pop(batch, None)
        if job is None:
            return
        self._starts.unschedule(job)
        self._backlog.drop(job)
        for task in job.running:
            task.cancel()
        for lane in self._partitions.forget(job):
            self._starts.careful.discard(lane)
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
        await self._partitions.follow(self._jobs, self._settings.limits.drain_s)
        self._take_up()

    def _take_up(self) -> None:
        self._resize()
        for job in list(self._jobs.values()):
            self._open_lanes(job)
        self._starts.pump()

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
                    self._starts.careful.discard(lane)
                    given_up.append(lane)
            self._starts.set_ready(job)
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
            if lane.started_upto and not lane.acked_upto:
                self._done.reserve(lane)
            if lane.crashes and not lane.acked_upto:
                metrics.CRASHED_LANES.inc()
                log.warning(
                    "records may have been running at a crash",
                    batch=job.batch,
                    partition=partition,
                    crashes=lane.crashes,
                    records=lane.suspected,
                )
            if lane.careful:
                self._starts.careful.add(lane)
        if job.closing is None:
            self._starts.schedule(job)
        elif not job.running:
            self._send_closed(job)
        self._starts.set_ready(job)

    # ---- time ----

    async def _tick(self) -> None:
        """Everything that is due by the clock: retries, endpoints that come back, expiry."""
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            self._starts.retry_due(now)
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
            self._starts.pump()

    # ---- ends ----

    def _begin_close(self, job: Job, reason: str) -> None:
        if job.closing is not None:
            return
        job.closing = reason
        job.stopped.set()
        self._backlog.drop(job)
        if job.running:
            self._starts.set_ready(job)  # for the further calls of what runs: in their turn, as before
        else:
            self._starts.unschedule(job)
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
