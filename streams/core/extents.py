"""Where a batch's records lie in a request topic: runs of offsets per partition.

Positions number a batch's records within one partition from 0 along its runs, so that what is done with
them fits in a small bitmap however many other batches lie between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

RECORDS_PER_STRIPE = 16
"""A batch is spread over no more partitions than it has this many records for each."""

Run = tuple[int, int]


def stripes(records: int, partitions: int, first: int) -> list[int]:
    """The partitions a batch of `records` is spread over, from `first` on."""
    width = min(partitions, -(-records // RECORDS_PER_STRIPE))
    return [(first + i) % partitions for i in range(width)]


class RunBuilder:
    """Collects acknowledged offsets of each partition, in order, into runs."""

    def __init__(self) -> None:
        self._runs: dict[int, list[list[int]]] = {}

    def add(self, partition: int, offset: int) -> None:
        runs = self._runs.setdefault(partition, [])
        if runs and runs[-1][1] + 1 == offset:
            runs[-1][1] = offset
        else:
            assert not runs or runs[-1][1] < offset, "offsets of one producer ascend"
            runs.append([offset, offset])

    def build(self) -> dict[int, list[Run]]:
        return {
            partition: [(first, last) for first, last in runs]
            for partition, runs in sorted(self._runs.items())
        }


class Positions:
    """Conversion between positions and offsets of one batch in one partition."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self._upto = list(accumulate(last - first + 1 for first, last in runs))
        self.count = self._upto[-1] if runs else 0

    def offset(self, position: int) -> int:
        run = bisect_right(self._upto, position)
        before = self._upto[run - 1] if run else 0
        return self.runs[run][0] + position - before

    def run_end(self, position: int) -> int:
        """The last offset of the run that holds `position`: a read may go on without a gap up to there."""
        return self.runs[bisect_right(self._upto, position)][1]

    def position(self, offset: int) -> int | None:
        """The position of an offset; None when it lies outside the runs."""
        run = bisect_right(self.runs, (offset, offset + (1 << 62))) - 1
        if run < 0 or offset > self.runs[run][1]:
            return None
        before = self._upto[run - 1] if run else 0
        return before + offset - self.runs[run][0]


def share(maximum: int, leads: Iterable[int], divisions: int) -> int:
    """The part of `maximum` concurrent calls that whoever has these of the divisions may use.

    The parts of all divisions add up to the maximum exactly, so dispatchers need not talk to each other.
    """
    return sum(maximum * (lead + 1) // divisions - maximum * lead // divisions for lead in leads)


def divisions(partitions: int, slots: int) -> int:
    """Into how many divisions a model's partitions fall when its smallest endpoint has so many slots.

    Each then has a slot on every endpoint. Usually a division is one partition; a partition without a slot
    of its own would keep its records for ever.
    """
    return max(1, min(partitions, slots))


def led(lead: int, partitions: int, divisions: int) -> range:
    """The partitions of a division: whoever is given its first one, the lead, has them all."""
    return range(lead, partitions, divisions) if lead < divisions else range(0)
