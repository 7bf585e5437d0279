"""How the places for uploads fall to organizations."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from schemas.ids import OrganizationId
from services.api.refusals import Refusal
from services.api.slots import Slots


def taken(slots: Slots, stack: ExitStack, organization: str) -> int:
    """How many an organization gets that takes all it can."""
    for count in range(1_000):
        try:
            stack.enter_context(slots.take(OrganizationId(organization)))
        except Refusal:
            return count
    raise AssertionError("there is no end of places")


@pytest.mark.parametrize(
    ("most", "parts"), [(32, [22, 7, 2, 1, 0]), (4, [3, 1, 0]), (2, [2, 0]), (1, [1, 0])]
)
def test_who_comes_later_finds_places(most: int, parts: list[int]) -> None:
    slots = Slots(most)
    with ExitStack() as stack:
        assert [taken(slots, stack, str(number)) for number in range(len(parts))] == parts


def test_those_who_come_together_get_as_much() -> None:
    slots, counts = Slots(32), {"a": 0, "b": 0, "c": 0}
    with ExitStack() as stack:
        for _ in range(32):
            for name in counts:
                try:
                    stack.enter_context(slots.take(OrganizationId(name)))
                except Refusal:
                    continue
                counts[name] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
        assert sum(counts.values()) < 32
        stack.enter_context(slots.take(OrganizationId("d")))


def test_places_come_back() -> None:
    slots = Slots(4)
    for _ in range(3):
        with ExitStack() as stack:
            assert taken(slots, stack, "a") == 3
