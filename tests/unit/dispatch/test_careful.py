"""Answers of suspects that went on beside others: each is handled while it is named and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

from schemas.ids import BatchId
from schemas.records import DoneSet, Request
from streams.core.lanes import Lane
from streams.core.lifecycle import BatchState
from streams.dispatch.backlog import Backlog
from streams.dispatch.careful import HANDLING_S, Careful
from streams.dispatch.done import DoneLog
from streams.dispatch.jobs import Job, Work
from streams.dispatch.runner import Runner


class Notes:
    """Stands in for the log of done-sets: who was named in each."""

    def __init__(self) -> None:
        self.named: list[tuple[int, int | None]] = []

    def reserve(self, lane: Lane) -> asyncio.Future[None]:
        self.named.append((lane.partition, lane.probing))
        written = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, written.set_result, None)
        return written


class Bench:
    """A job with lanes in which records run already, of which some are suspects."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.tasks: list[asyncio.Task[None]] = []
        self.job = Job(BatchId("batch_x"), BatchState(), "m")
        self.handled: list[tuple[int, int]] = []
        self.careful = Careful(
            {self.job.batch: self.job},
            {},
            cast("Backlog", None),
            cast("DoneLog", self.notes),
            cast("Runner", None),
            start=cast("Any", None),
            cut_off=cast("Any", None),
            may_start=lambda: True,
            others_wait=lambda: False,
            pump=lambda: None,
            spawn=self.spawn,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def lane(self, partition: int, *, crashes: int) -> Lane:
        """With two records that were running at the last crash."""
        before = DoneSet(
            batch=self.job.batch,
            attempt="a",
            topic="requests.x",
            partition=partition,
            finished=b"",
            started_upto=2,
            results_upto=0,
            crashes=crashes - 1,
            probing=None,
            clean=False,
        )
        lane = Lane(self.job.batch, "a", "requests.x", partition, [(0, 9)], before)
        self.job.lanes[partition] = lane
        if lane.careful:
            self.careful.add(lane)
        return lane

    def answer(self, lane: Lane, position: int, handling_s: float = 0.0) -> asyncio.Task[None]:
        """A record whose answer has come."""
        request = Request(batch=self.job.batch, attempt="a", index=position, custom_id=f"r{position}")
        work = Work(lane, position, request, 1)

        async def run() -> None:
            if self.careful.must_wait(work):
                await self.careful.wait(self.job, work)
            self.handled.append((lane.partition, position))
            await asyncio.sleep(handling_s)
            self.handled.append((lane.partition, position))

        task = asyncio.get_running_loop().create_task(run())
        self.job.running[task] = work
        return task

    async def end(self) -> None:
        await asyncio.gather(*self.job.running)
        await asyncio.gather(*self.tasks)


async def test_a_suspect_is_named_while_its_answer_is_handled_and_no_longer() -> None:
    bench = Bench()
    bench.answer(bench.lane(0, crashes=2), 1)
    await bench.end()
    assert bench.notes.named == [(0, 1), (0, None)]
    assert not bench.careful.alone


async def test_answers_of_suspects_are_handled_one_at_a_time() -> None:
    bench = Bench()
    for partition in (0, 1):
        lane = bench.lane(partition, crashes=2)
        for position in (0, 1):
            bench.answer(lane, position, 0.01)
    await bench.end()
    assert bench.handled[0::2] == bench.handled[1::2]
    assert len(set(bench.handled)) == 4
    assert [position is None for _, position in bench.notes.named] == [False, True] * 4


async def test_other_answers_wait_meanwhile() -> None:
    bench = Bench()
    suspects, others = bench.lane(0, crashes=2), bench.lane(1, crashes=1)
    bench.answer(suspects, 0, 0.05)
    while not bench.handled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    bench.answer(others, 0)
    assert bench.careful.alone
    await bench.end()
    assert bench.handled == [(0, 0), (0, 0), (1, 0), (1, 0)]


async def test_other_answers_wait_for_no_one_for_long() -> None:
    bench = Bench()
    suspects, others = bench.lane(0, crashes=2), bench.lane(1, crashes=1)
    bench.answer(suspects, 0, HANDLING_S + 0.2)
    while not bench.handled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    bench.answer(others, 0)
    await bench.end()
    assert bench.handled == [(0, 0), (1, 0), (1, 0), (0, 0)]
    assert bench.notes.named == [(0, 0), (0, None)]


async def test_a_suspect_that_is_stopped_before_its_turn_leaves_nobody_waiting() -> None:
    bench = Bench()
    lane = bench.lane(0, crashes=2)
    first, second = bench.answer(lane, 0, 0.05), bench.answer(lane, 1)
    while not bench.handled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second])
    await asyncio.gather(*bench.tasks)
    assert bench.handled == [(0, 0), (0, 0)]
    assert not bench.careful.alone
    assert lane.probing is None


async def test_a_suspect_of_a_lane_that_was_taken_away_is_not_named() -> None:
    """What the lane's next owner writes of it would be overwritten."""
    bench = Bench()
    lane = bench.lane(0, crashes=2)
    bench.answer(lane, 0)
    del bench.job.lanes[0]
    await bench.end()
    assert bench.handled == [(0, 0), (0, 0)]
    assert bench.notes.named == []
    assert not bench.careful.alone
