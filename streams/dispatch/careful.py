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
      dies: nobody is named, so nobody is given up; with each such crash the patience in 1 and 3 grows

If what runs does not end in time in 1, the suspect runs beside it unnamed, as in 4. After a restart nothing
runs yet and the suspects go first, so the first of them is alone whatever the others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

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
        self._lanes: dict[Lane, dict[int, Work]] = {}
        """With what is known of suspects that were tried and are among the unread again."""
        self._standstill = Standstill()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def alone(self) -> bool:
        """Whether nothing else may start now."""
        return bool(self._standstill)

    def add(self, lane: Lane) -> None:
        self._lanes.setdefault(lane, {})

    def discard(self, lane: Lane) -> None:
        self._lanes.pop(lane, None)

    def put_back(self, work: Work) -> None:
        """A suspect that may be tried again now."""
        work.lane.unread(work.position, work.position)
        if work.lane in self._lanes:
            self._lanes[work.lane][work.position] = work

    def begin(self, spawn: Callable[..., asyncio.Task[None]]) -> None:
        """Look for suspects that can run, unless that is done already, until none is left."""
        if self._task is None:
            self._task = spawn(self._run())

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
            running = [task for job in self._jobs.values() for task in job.running]
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
        lane, position = work.lane, work.position
        if alone_s is not None:
            lane.probing = position
            await asyncio.shield(self._done.reserve(lane))
        if not self._ours(job, lane) or not self._may_start():
            slot.release()
            self.put_back(work)
            ended = True
        else:
            task = self._start(job, work, pool, slot)
            if alone_s is None:
                return False
            ended = bool((await asyncio.wait([task], timeout=alone_s))[0])
            if ended and not task.cancelled():
                task.result()  # if it raised, that ends the process, and the record stays named
        if lane.probing == position:
            lane.probing = None
            if self._owned(job, lane):
                await asyncio.shield(self._done.reserve(lane))
        return ended

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
