"""Records that may have killed this process run alone.

After two crashes in a row that found records of a lane running, those are suspects: they run one at a time,
nothing else beside them, and each is named in the log before it starts. If the process dies while one is
named, that one is given up (`processing_failed`) and the others go on.

Nobody is held up by a suspect that only waits: for its model to be in the settings, for a slot, for its next
try. What can run takes turns with everybody else (`streams.core.standstill`):

1. nothing else starts, and what runs is waited for, but not for ever
2. the suspect is named, which is acknowledged, and runs
      dies, also by what its handling raised: it was alone, so it is given up
3. it has ended, or the others have waited long enough; that it is named no more is acknowledged
      dies before: as 2
4. the others start again, and a call that has not ended goes on beside them
      dies: nobody is named, so nobody is given up; after such a crash the patience in 1 and 3 is longer
5. an answer of its model, tool or callback has come: nothing else starts, no other answer is handled, the
   suspect is named again, which is acknowledged, and its answer is handled
      dies: as 2
6. it has ended, or has more to do and goes on as in 4

If what runs does not end in time in 1, the suspect runs beside it unnamed, as in 4. After a restart nothing
runs yet and the suspects go first, so the first of them is alone whatever the others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from schemas.errors import RunCode
from schemas.ids import BatchId
from schemas.records import Failed
from streams.core.lanes import Lane
from streams.core.standstill import Standstill, patience_s
from streams.dispatch.backlog import Backlog
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.runner import Runner
from streams.kafka.messages import KafkaFailed
from streams.pools.pool import ModelPool, Slot

LOOK_EVERY_S = 0.05
"""Whether a suspect can run and whether it is their turn."""

HANDLING_S = 1.0
"""The others wait so long for an answer to be handled; most take milliseconds."""

_GIVEN_UP = "the request was being handled at three crashes of the dispatcher"

log = structlog.get_logger("openrelay.dispatch")

Start = Callable[[Job, Work, ModelPool, Slot], asyncio.Task[None]]


class Careful:
    """The lanes with suspects, for one event loop.

    `start` runs a record in a task of its own, and who calls that calls `put_back` when another try is due.
    `may_start` says whether anything may start, `others_wait` whether anything else would, `pump` starts it.
    """

    def __init__(
        self,
        jobs: Mapping[BatchId, Job],
        pools: Mapping[str, ModelPool],
        backlog: Backlog,
        done: DoneLog,
        runner: Runner,
        *,
        start: Start,
        cut_off: Callable[[Job, Work, str, str], Failed],
        may_start: Callable[[], bool],
        others_wait: Callable[[], bool],
        pump: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._jobs = jobs
        self._pools = pools
        self._backlog = backlog
        self._done = done
        self._runner = runner
        self._start = start
        self._cut_off = cut_off
        self._may_start = may_start
        self._others_wait = others_wait
        self._pump = pump
        self._spawn = spawn
        self._lanes: dict[Lane, dict[int, Work]] = {}
        """With what is known of suspects that were tried and are among the unread again."""
        self._standstill = Standstill()
        self._naming = asyncio.Lock()
        """Held while a suspect is named: never two."""
        self._calm = asyncio.Event()
        """Not set while the answer of a suspect is handled."""
        self._calm.set()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def alone(self) -> bool:
        """Whether nothing else may start now."""
        return bool(self._standstill) or self.handling

    @property
    def handling(self) -> bool:
        """Whether the answer of a suspect is handled now, and none else may be."""
        return not self._calm.is_set()

    def add(self, lane: Lane) -> None:
        self._lanes.setdefault(lane, {})

    def discard(self, lane: Lane) -> None:
        self._lanes.pop(lane, None)

    def put_back(self, work: Work) -> None:
        """A suspect that may be tried again now."""
        work.lane.unread(work.position, work.position)
        if work.lane in self._lanes:
            self._lanes[work.lane][work.position] = work

    def begin(self) -> None:
        """Look for suspects that can run, unless that is done already, until none is left."""
        if self._task is None:
            self._task = self._spawn(self._run())

    def must_wait(self, work: Work) -> bool:
        """Whether an answer to a record may not be handled at once."""
        if not self._lanes or work.lane.probing == work.position:
            return False
        return self.handling or work.lane.runs_alone(work.position)

    async def wait(self, job: Job, work: Work) -> None:
        """An answer has come that must wait: return when it may be handled."""
        if not work.lane.runs_alone(work.position):
            await self._calm.wait()
            return
        named = self._loop.create_future()
        self._spawn(self._handle(job, work, named))
        await named

    async def _handle(self, job: Job, work: Work, named: asyncio.Future[None]) -> None:
        async with self._naming:
            begun = await self._begin_turn()
            self._calm.clear()
            try:
                await asyncio.sleep(LOOK_EVERY_S)  # for what is being handled
                if self._owned(job, work.lane):  # else it is another dispatcher's to name
                    await self._name(work)
                running = [task for task, other in job.running.items() if other is work]
                if not named.done():
                    named.set_result(None)
                if running:
                    await self._stand_by(job, work, running[0], HANDLING_S)
                else:
                    await self._name_no_more(job, work)
            finally:
                self._calm.set()
                if begun:
                    self._standstill.end(self._loop.time())
        self._pump()

    async def _begin_turn(self) -> bool:
        """Return when it is the suspects' turn; whether it was begun here."""
        while not self._standstill:
            now = self._loop.time()
            if self._standstill.due(now, others_wait=self._others_wait()):
                self._standstill.begin(now)
                return True
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    async def _run(self) -> None:
        try:
            while self._lanes:
                if self._due():
                    await self._turn()
                else:
                    await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._task = None

    def _due(self) -> bool:
        if not self._may_start() or self._next() is None:
            return False
        return self._standstill.due(self._loop.time(), others_wait=self._others_wait())

    def _next(self) -> tuple[Job, Lane] | None:
        """A lane with a suspect that can run at this moment; lanes without suspects are forgotten."""
        for lane in list(self._lanes):
            job = self._jobs.get(lane.batch)
            if job is None or job.closing is not None or not lane.careful:
                self.discard(lane)
            elif lane.apart and (lane.apart[0] == lane.given_up or self._has_slot(job)):
                return job, lane
        return None

    def _has_slot(self, job: Job) -> bool:
        """Whether one of its model is free; a model that is not in the settings has none."""
        pool = self._pools.get(job.model)
        return pool is not None and pool.free(self._loop.time()) > 0

    async def _turn(self) -> None:
        self._standstill.begin(self._loop.time())
        try:
            patience = patience_s(
                max(lane.crashes for lane in self._lanes), self._runner.limits.request_time_limit_s
            )
            running = [
                task
                for job in self._jobs.values()
                for task, work in job.running.items()
                if work.loops or not work.lane.runs_alone(work.position)
            ]
            late = (await asyncio.wait(running, timeout=patience))[1] if running else ()
            while await self._run_next(None if late else patience):
                if self._standstill.over(self._loop.time()) or not self._may_start():
                    break
        finally:
            self._standstill.end(self._loop.time())
        self._pump()

    async def _run_next(self, alone_s: float | None) -> bool:
        """Run the next suspect, alone for at most so long, or beside others; whether it ended alone."""
        found = self._next()
        if found is None:
            return False
        job, lane = found
        self._lanes[lane] = self._lanes.pop(lane)  # the next one is another lane's
        position = lane.apart.popleft()
        work = self._lanes[lane].pop(position, None) or await self._read(lane, position)
        if work is None:
            return False
        if not self._ours(job, lane):
            lane.unread(position, position)
            return True
        if position == lane.given_up:
            await self._runner.send(job, work, self._cut_off(job, work, RunCode.PROCESSING_FAILED, _GIVEN_UP))
            return True
        pool = self._pools[job.model]
        slot = pool.acquire(self._loop.time(), work.avoid)
        if slot is None:
            self.put_back(work)
            return True
        return await self._run_alone(job, work, pool, slot, alone_s)

    async def _run_alone(
        self, job: Job, work: Work, pool: ModelPool, slot: Slot, alone_s: float | None
    ) -> bool:
        if alone_s is None:
            self._start(job, work, pool, slot)
            return False
        async with self._naming:
            await self._name(work)
            if self._ours(job, work.lane) and self._may_start():
                return await self._stand_by(job, work, self._start(job, work, pool, slot), alone_s)
            slot.release()
            self.put_back(work)
            await self._name_no_more(job, work)
            return True

    async def _stand_by(self, job: Job, work: Work, task: asyncio.Task[None], most_s: float) -> bool:
        """Wait for a named suspect to end, but not for ever; then it is named no more. Whether it ended."""
        ended = bool((await asyncio.wait([task], timeout=most_s))[0])
        if ended and not task.cancelled():
            task.result()  # if it raised, that ends the process, and the record stays named
        await self._name_no_more(job, work)
        return ended

    async def _name(self, work: Work) -> None:
        work.lane.probing = work.position
        await asyncio.shield(self._done.reserve(work.lane))

    async def _name_no_more(self, job: Job, work: Work) -> None:
        if work.lane.probing == work.position:
            work.lane.probing = None
            if self._owned(job, work.lane):
                await asyncio.shield(self._done.reserve(work.lane))

    async def _read(self, lane: Lane, position: int) -> Work | None:
        try:
            return await self._backlog.read_one(lane, position)
        except KafkaFailed as error:
            lane.unread(position, position)
            log.warning("read failed, will be repeated", batch=lane.batch, error=str(error))
            return None

    def _ours(self, job: Job, lane: Lane) -> bool:
        """Whether its records are still ours to run."""
        return job.closing is None and self._owned(job, lane)

    def _owned(self, job: Job, lane: Lane) -> bool:
        return self._jobs.get(job.batch) is job and job.lanes.get(lane.partition) is lane
