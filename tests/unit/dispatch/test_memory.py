"""Records under way share a bounded memory, and one of them can always go on."""

from __future__ import annotations

import asyncio

import pytest

from streams.dispatch.memory import Memory, TooLarge


async def waiting(task: asyncio.Task[None]) -> bool:
    """Whether a task still waits when all that can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_who_does_not_fit_waits_until_another_has_ended() -> None:
    memory = Memory(100, 100)
    first, second, third = (memory.hold("o", size) for size in (60, 20, 0))
    assert not second.take(30)
    large = asyncio.create_task(second.wait(30))
    assert await waiting(large)
    assert third.take(20), "what fits goes on"
    assert memory.used == 100
    first.end()
    assert not await waiting(large)
    assert (second.size, memory.used) == (50, 70)
    second.give(40)
    assert memory.used == 30


async def test_the_one_that_began_first_always_goes_on() -> None:
    memory = Memory(100, 100)
    holds = [memory.hold("o", 40) for _ in range(3)]
    waits = [asyncio.create_task(hold.wait(40)) for hold in holds]
    for hold, wait, later in zip(holds, waits, [*waits[1:], None], strict=True):
        assert not await waiting(wait)
        assert later is None or await waiting(later)
        hold.end()
    assert memory.used == 0


async def test_a_part_is_left_to_other_organizations() -> None:
    memory = Memory(100, 50)
    eldest, greedy, other = memory.hold("a", 0), memory.hold("b", 50), memory.hold("c", 0)
    assert not greedy.take(1)
    assert memory.full("b")
    assert other.take(50)
    assert eldest.take(80), "it goes beyond the whole"
    assert memory.full("d")


async def test_a_limit_is_no_reason_to_wait() -> None:
    hold = Memory(100, 100).hold("o", 10)
    hold.limit = 20
    assert hold.take(10)
    with pytest.raises(TooLarge):
        await hold.wait(1)
    async with hold.borrowed(1_000):
        pass


async def test_who_stops_waiting_has_taken_nothing() -> None:
    memory = Memory(100, 100)
    first, second = memory.hold("o", 100), memory.hold("o", 0)
    before, at_once = asyncio.create_task(second.wait(10)), asyncio.create_task(second.wait(20))
    assert await waiting(before)
    before.cancel()
    assert not await waiting(before)
    first.give(100)
    at_once.cancel()  # it was just given its room
    assert not await waiting(at_once)
    assert (second.size, memory.used) == (0, 0)
    async with second.borrowed(30):
        assert (second.size, memory.used) == (0, 30)
    assert memory.used == 0
    second.end()
    first.end()
    assert not memory.full("o")
