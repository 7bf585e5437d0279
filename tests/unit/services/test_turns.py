"""In which order the work of several organizations is done."""

from __future__ import annotations

import asyncio

import pytest

from schemas.ids import OrganizationId
from services.api.turns import Turns


class Crowd:
    """Callers who keep their turn until they are told to go."""

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self.turns = Turns(most, most_each)
        self.began: list[str] = []
        self._go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, *names: str) -> None:
        """Callers, named for their organization and a digit."""
        for name in names:
            self._go[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
        await self._settle()

    async def goes(self, name: str) -> None:
        self._go[name].set()
        await self.tasks[name]
        await self._settle()

    async def gives_up(self, name: str) -> None:
        self.tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.tasks[name]
        await self._settle()

    async def _stay(self, name: str) -> None:
        async with self.turns.take(OrganizationId(name[0])):
            self.began.append(name)
            await self._go[name].wait()

    async def _settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_one_that_has_sent_much_does_not_come_before_all_others() -> None:
    crowd = Crowd(2)
    await crowd.comes("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert crowd.began == ["a1", "a2"]
    for name, expected in (("a1", "b1"), ("a2", "c1"), ("b1", "a3"), ("a3", "b2"), ("c1", "a4")):
        await crowd.goes(name)
        assert crowd.began[-1] == expected


async def test_one_never_has_all_of_them() -> None:
    crowd = Crowd(3, 2)
    await crowd.comes("a1", "a2", "a3", "a4")
    assert crowd.began == ["a1", "a2"]
    await crowd.comes("b1")
    assert crowd.began == ["a1", "a2", "b1"]
    await crowd.goes("b1")
    assert crowd.began == ["a1", "a2", "b1"]
    await crowd.goes("a1")
    assert crowd.began == ["a1", "a2", "b1", "a3"]


async def test_those_with_as_much_under_way_take_turns() -> None:
    crowd = Crowd(1)
    await crowd.comes("a1", "a2", "a3", "b1", "b2", "b3")
    while len(crowd.began) < 6:
        await crowd.goes(crowd.began[-1])
    assert crowd.began == ["a1", "b1", "a2", "b2", "a3", "b3"]


async def test_who_gives_up_holds_nothing() -> None:
    crowd = Crowd(1)
    await crowd.comes("a1", "b1", "c1")
    await crowd.gives_up("b1")
    await crowd.gives_up("a1")
    assert crowd.began == ["a1", "c1"]
    await crowd.goes("c1")
    await crowd.comes("a2")
    assert crowd.began[-1] == "a2"


async def test_who_gives_up_in_the_instant_of_its_turn_passes_it_on() -> None:
    crowd = Crowd(1)
    async with crowd.turns.take(OrganizationId("a")):
        await crowd.comes("b1", "c1")
    await crowd.gives_up("b1")  # its turn has been given, and it has not run yet
    assert crowd.began == ["c1"]


async def test_who_has_just_given_up_gets_no_turn() -> None:
    crowd = Crowd(1)
    async with crowd.turns.take(OrganizationId("a")):
        await crowd.comes("b1", "c1")
        crowd.tasks["b1"].cancel()
    await crowd.gives_up("b1")
    assert crowd.began == ["c1"]
