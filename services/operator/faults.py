"""What an audit finds wrong: every fault is counted, so many of them are kept."""

from __future__ import annotations

import msgspec

MOST_KEPT = 100


class Fault(msgspec.Struct, frozen=True):
    """`place` is where it is wrong; `index` the record it is about, None when it is about all of them."""

    place: str
    said: str
    index: int | None = None

    def __str__(self) -> str:
        record = "" if self.index is None else f" record {self.index}:"
        return f"{self.place}:{record} {self.said}"


class Faults:
    def __init__(self) -> None:
        self.kept: list[Fault] = []
        self.count = 0

    def add(self, place: str, said: str, index: int | None = None) -> None:
        self.count += 1
        if len(self.kept) < MOST_KEPT:
            self.kept.append(Fault(place, said, index))

    def compare(
        self, place: str, what: str, found: object, expected: object, index: int | None = None
    ) -> None:
        """A fault unless they are equal."""
        if found != expected:
            self.add(place, f"{what} is {found}, must be {expected}", index)
