"""How far each stage is behind its topics."""

from __future__ import annotations

import msgspec

from schemas import topics
from streams.kafka.admin import Admin


class PartitionLag(msgspec.Struct, frozen=True):
    """Records of one partition that one consumer group has not finished.

    `committed` is where the group goes on, -1 when it has committed nothing: then it is behind by all that
    the partition still has.
    """

    group: str
    topic: str
    partition: int
    committed: int
    end: int
    lag: int


class Lag(msgspec.Struct, frozen=True):
    """The same for a whole topic."""

    group: str
    topic: str
    partitions: int
    lag: int


def groups(admin: Admin) -> dict[str, list[str]]:
    """The consumer groups and what each reads to its end; also for models that the settings do not name."""
    return {
        "dispatch": admin.topics(topics.REQUESTS_PREFIX),
        "settle": [topics.RESULTS],
        "sink": [topics.OUTPUTS, topics.ERRORS],
        "meter": [topics.USAGE, topics.BATCHES],
    }


def partition_lags(admin: Admin) -> list[PartitionLag]:
    """Committed offsets first, then end offsets, so that a lag is never too small.

    Blocks for a few round trips; raises KafkaFailed.
    """
    found = []
    for group, names in groups(admin).items():
        counts = admin.partitions(names)
        places = [(name, number) for name, count in counts.items() for number in range(count)]
        committed = admin.committed(group, places)
        first = admin.first_offsets(places)
        ends = admin.end_offsets(places)
        for place in places:
            at = committed.get(place, -1)
            found.append(PartitionLag(group, *place, at, ends[place], ends[place] - max(at, first[place])))
    return found


def by_topic(lags: list[PartitionLag]) -> list[Lag]:
    """Sums, in the same order."""
    sums: dict[tuple[str, str], Lag] = {}
    for each in lags:
        key = (each.group, each.topic)
        known = sums.get(key, Lag(*key, 0, 0))
        sums[key] = Lag(*key, known.partitions + 1, known.lag + each.lag)
    return list(sums.values())
