"""Records under way share a bounded memory, and one of them can always go on."""

from __future__ import annotations

import asyncio

import pytest

from streams.dispatch.memory import Hold, Memory, TooLarge
from streams.tools.egress import Places


async def waiting(task: asyncio.Task[None]) -> bool:
    """Whether a task still waits when all that can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_who_does_not_fit_waits_until_another_has_ended() -> None:
    memory = Memory(100, 100)
    first, second, third = (memory.hold("o", "m", size) for size in (60, 20, 0))
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
    holds = [memory.hold("o", "m", 40) for _ in range(3)]
    waits = [asyncio.create_task(hold.wait(40)) for hold in holds]
    for hold, wait, later in zip(holds, waits, [*waits[1:], None], strict=True):
        assert not await waiting(wait)
        assert later is None or await waiting(later)
        hold.end()
    assert memory.used == 0


async def test_a_part_is_left_to_other_organizations() -> None:
    memory = Memory(100, 50)
    eldest, greedy, other = memory.hold("a", "m", 0), memory.hold("b", "m", 50), memory.hold("c", "m", 0)
    assert not greedy.take(1)
    assert memory.full("b")
    assert other.take(50)
    assert eldest.take(80), "it goes beyond the whole"
    assert memory.full("d")


async def test_each_model_has_one_that_goes_on() -> None:
    memory = Memory(100, 100)
    out, other, later = memory.hold("o", "out", 100), memory.hold("o", "m", 0), memory.hold("o", "m", 0)
    assert out.eldest.is_set()
    assert other.take(50)
    assert not later.take(1)
    other.end()
    assert later.eldest.is_set()
    assert later.take(50)


async def test_places_held_by_those_that_wait_do_not_stop_the_eldest() -> None:
    memory, places = Memory(100, 100), Places(2)

    async def run(hold: Hold) -> None:
        for _ in range(3):
            async with places.of("host", hold.eldest):
                await hold.wait(40)
            await asyncio.sleep(0)  # the model's turn
        most.append(memory.used)
        hold.end()

    most: list[int] = []
    async with asyncio.timeout(5):
        await asyncio.gather(*(run(memory.hold("o", "m", 0)) for _ in range(20)))
    assert memory.used == 0
    assert max(most) <= 100 + 120
    assert not places._known


async def test_a_limit_is_no_reason_to_wait() -> None:
    hold = Memory(100, 100).hold("o", "m", 10)
    hold.limit = 20
    assert hold.take(10)
    with pytest.raises(TooLarge):
        await hold.wait(1)
    async with hold.borrowed(1_000):
        pass


async def test_who_stops_waiting_has_taken_nothing() -> None:
    memory = Memory(100, 100)
    first, second = memory.hold("o", "m", 100), memory.hold("o", "m", 0)
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
