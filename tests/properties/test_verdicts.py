"""The arbiter under schedules nobody chose: settlers that pause, wake up late, crash and start again.

Whatever they do, what has been written adds up to what one settler that never stopped would have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.facts import Enqueued, Settled
from schemas.ids import BatchId
from schemas.money import Price, Usage
from schemas.records import (
    ALL_PARTITIONS,
    Answered,
    Closed,
    Failed,
    Ledger,
    Line,
    Remainder,
    Result,
    UsageRow,
)
from streams.core.lifecycle import BatchState
from streams.core.verdicts import Spec, Tally, decide, spec_of
from streams.settle.partition import Partition
from tests.support import facts

PRICE = Price("price_test", 150_000_000, 75_000_000, 600_000_000, 5_000)
MONTH = 202611


def spec(name: str, total: int, partitions: int) -> Spec:
    created = facts.created(name, total=total, rejected=0, price=PRICE)
    extents = {p: [(0, 0)] for p in range(partitions)}
    enqueued = Enqueued(batch=created.batch, attempt="a", topic="t", extents=extents)
    found = spec_of(BatchState(created=created, enqueued=enqueued), MONTH)
    assert found is not None
    return found


SPECS = {s.created.batch: s for s in (spec("batch_a", 6, 2), spec("batch_b", 3, 1))}


@st.composite
def results(draw: st.DrawFn) -> Result:
    chosen = draw(st.sampled_from(sorted(SPECS)))
    batch = BatchId(chosen)
    kind = draw(st.integers(0, 9))
    index = draw(st.integers(0, SPECS[batch].created.total - 1))
    if kind < 6:
        usage = draw(st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9)))
        body = msgspec.Raw(msgspec.json.encode({"n": draw(st.integers(0, 99))}))
        return Answered(
            batch=batch,
            index=index,
            custom_id=f"c{index}",
            origin=(0, index),
            status_code=200,
            request_id="r",
            body=body,
            usage=usage,
        )
    if kind < 8:
        code = draw(st.sampled_from(["model_unavailable", "batch_expired"]))
        return Failed(
            batch=batch, index=index, custom_id=f"c{index}", origin=(0, index), code=code, message="x"
        )
    partition = draw(st.sampled_from([ALL_PARTITIONS, 0, 1]))
    return Closed(batch=batch, partition=partition, reason=draw(st.sampled_from(["cancelled", "expired"])))


class World:
    """Everything durable: the log, what was written, the ledger, the committed offset, the settled facts."""

    def __init__(self, log: list[Result]) -> None:
        self.log = log
        self.lines: list[tuple[str, Line | Remainder]] = []
        self.usage: list[tuple[BatchId, UsageRow]] = []
        self.settled: list[Settled] = []
        self.ledger: dict[BatchId, Ledger] = {}
        self.committed = 0
        self.generation = 0


class Settler:
    """The flush protocol of the settle stage, one step at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.generation += 1
        self.generation = world.generation
        self.partition = Partition(0, dict(world.ledger))
        settled = {fact.batch for fact in world.settled}
        self.partition.start(world.committed, set(SPECS) - settled)
        self.steps = self._run()

    def _run(self) -> Iterator[None]:
        world, partition = self.world, self.partition
        while True:
            effects: list[Any] = []
            for _ in range(3):
                if partition.position >= len(world.log):
                    break
                offset = partition.position
                result = world.log[offset]
                partition.position += 1
                tally = partition.tallies.get(result.batch)
                if tally is None:
                    if any(fact.batch == result.batch for fact in world.settled):
                        continue
                    tally = partition.open(SPECS[result.batch])
                effects.append(
                    (result.batch, decide(SPECS[result.batch], tally, offset, 1000 + offset, result))
                )
                partition.touched.add(result.batch)
                yield
            for batch, effect in effects:
                if effect.output is not None:
                    world.lines.append(("output", effect.output))
                if effect.error is not None:
                    world.lines.append(("error", effect.error))
                world.lines += [("error", line) for line in effect.cut_off]
                world.usage += [(batch, row) for row in effect.usage]
                yield
            for _, effect in effects:
                if effect.settled is not None:
                    world.settled.append(effect.settled)
                yield
            for ledger in partition.ledgers_due():
                world.ledger[ledger.batch] = ledger
                yield
            if self.generation == world.generation:
                world.committed = partition.position
            partition.touched = set()
            yield


def summary(world: World) -> dict[str, Any]:
    """What readers of the written topics conclude: first of each identity, duplicates must be equal."""
    lines: dict[tuple[str, BatchId, int], bytes] = {}
    remainders: dict[BatchId, bytes] = {}
    for which, line in world.lines:
        if isinstance(line, Remainder):
            assert remainders.setdefault(line.batch, line.seen) == line.seen
        else:
            key = (which, line.batch, line.index)
            assert lines.setdefault(key, bytes(line.line)) == bytes(line.line)
    usage: dict[tuple[BatchId, int], UsageRow] = {}
    for batch, row in world.usage:
        assert usage.setdefault((batch, row.request_index), row) == row
    settled: dict[BatchId, Settled] = {}
    for fact in world.settled:
        assert settled.setdefault(fact.batch, fact) == fact
    return {"lines": lines, "remainders": remainders, "usage": usage, "settled": settled}


def reference(log: list[Result]) -> dict[str, Any]:
    world = World(log)
    tallies: dict[BatchId, Tally] = {}
    for offset, result in enumerate(log):
        tally = tallies.setdefault(result.batch, Tally(SPECS[result.batch]))
        effect = decide(SPECS[result.batch], tally, offset, 1000 + offset, result)
        if effect.output is not None:
            world.lines.append(("output", effect.output))
        if effect.error is not None:
            world.lines.append(("error", effect.error))
        world.lines += [("error", line) for line in effect.cut_off]
        world.usage += [(result.batch, row) for row in effect.usage]
        if effect.settled is not None:
            world.settled.append(effect.settled)
    return summary(world)


@settings(max_examples=400, deadline=None)
@given(st.lists(results(), max_size=30), st.lists(st.integers(0, 7), max_size=250))
def test_any_schedule_gives_the_verdicts_of_one_settler(log: list[Result], schedule: list[int]) -> None:
    world = World(log)
    alive = [Settler(world)]
    for choice in schedule:
        if choice == 7:
            alive.append(Settler(world))  # a successor, while the older ones may wake up again
        elif choice == 6 and len(alive) > 1:
            alive.pop(0)  # one that never wakes up
        else:
            next(alive[choice % len(alive)].steps)
    last = Settler(world)
    for _ in range(20 * (len(log) + 5)):
        next(last.steps)
    assert summary(world) == reference(log)
    for batch, tally in last.partition.tallies.items():
        assert tally.completed + tally.failed <= SPECS[batch].accepted
    for fact in world.settled:
        assert fact.completed + fact.failed == SPECS[fact.batch].created.total


def test_a_ledger_written_late_sends_the_next_reader_back() -> None:
    """A settler wakes up and writes an old ledger over its successor's; the third reads what it lacks."""
    batch = BatchId("batch_a")

    def answered(index: int, n: int) -> Answered:
        body = msgspec.Raw(msgspec.json.encode({"n": n}))
        return Answered(
            batch=batch,
            index=index,
            custom_id=f"c{index}",
            origin=(0, index),
            status_code=200,
            request_id="r",
            body=body,
            usage=Usage(n, n),
        )

    log: list[Result] = [
        *(answered(i, i) for i in range(5)),
        answered(4, 77),
        answered(3, 99),
        answered(5, 5),
    ]
    world = World(log)
    sleeper = Settler(world)
    while len(world.lines) < 3:
        next(sleeper.steps)
    successor = Settler(world)
    while world.committed < 6:
        next(successor.steps)
    while world.ledger[batch].upto > 3:
        next(sleeper.steps)
    last = Settler(world)
    for _ in range(100):
        next(last.steps)
    assert summary(world) == reference(log)
