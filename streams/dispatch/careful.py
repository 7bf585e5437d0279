"""Records that may have killed this process run alone.

After two crashes in a row that found records of a lane running, those are suspects: they run one at a time,
nothing else beside them, and each is named in the log before it starts. If the process dies again, the one
named is given up (`processing_failed`) and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from schemas.errors import RunCode
from schemas.ids import BatchId
from schemas.records import Answered, Failed
from streams.core.judge import Again
from streams.core.lanes import Lane
from streams.dispatch.backlog import Backlog
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.runner import Runner
from streams.pools.pool import ModelPool, Slot

SLOT_POLL_S = 0.05

_GIVEN_UP = "the request was being handled at three crashes of the dispatcher"


class Careful:
    """The lanes with suspects. While there are any, the dispatcher starts nothing else."""

    def __init__(
        self,
        jobs: Mapping[BatchId, Job],
        pools: Mapping[str, ModelPool],
        backlog: Backlog,
        done: DoneLog,
        runner: Runner,
        call: Callable[[Job, Work, ModelPool, Slot], Awaitable[Answered | Failed | Again]],
        cut_off: Callable[[Job, Work, str, str], Failed],
    ) -> None:
        self._jobs = jobs
        self._pools = pools
        self._backlog = backlog
        self._done = done
        self._runner = runner
        self._call = call
        self._cut_off = cut_off
        self._lanes: set[Lane] = set()
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, lane: Lane) -> None:
        self._lanes.add(lane)

    def discard(self, lane: Lane) -> None:
        self._lanes.discard(lane)

    def start(self, spawn: Callable[..., asyncio.Task[None]], finished: Callable[[], None]) -> None:
        """Begin, unless it has begun; `finished` is called when no suspect is left."""
        if self.task is not None:
            return

        def ended(_: asyncio.Task[None]) -> None:
            self.task = None
            finished()

        self.task = spawn(self._run())
        self.task.add_done_callback(ended)

    async def _run(self) -> None:
        while self._lanes:
            lane = next(iter(self._lanes))
            job = self._jobs[lane.batch]
            span = lane.next_read(1) if lane.careful and job.closing is None else None
            if span is None:
                self._lanes.discard(lane)
                continue
            work = await self._backlog.read_one(lane, span[0])
            lane.probing = work.position
            await self._done.reserve(lane)
            await self._run_alone(job, work)

    async def _run_alone(self, job: Job, work: Work) -> None:
        """Run a record to its result, attempts and waits included."""
        if work.position == work.lane.given_up:
            await self._runner.send(job, work, self._cut_off(job, work, RunCode.PROCESSING_FAILED, _GIVEN_UP))
            return
        pool = self._pools[job.model]
        while job.closing is None and work.lane in self._lanes:
            slot = pool.acquire(self._loop.time(), work.avoid)
            if slot is None:
                await asyncio.sleep(SLOT_POLL_S)
                continue
            work.lane.start(work.position)
            outcome = await self._call(job, work, pool, slot)
            if not isinstance(outcome, Again):
                await self._runner.send(job, work, outcome)
                return
            work.lane.abandon(work.position)
            await asyncio.sleep(outcome.wait_s)
