"""How far each stage is behind its topics."""

from __future__ import annotations

import msgspec

from schemas import topics
from schemas.settings import Settings
from streams.kafka.admin import Admin, TopicPartition


class Lag(msgspec.Struct, frozen=True):
    """Records of one topic that one consumer group has not finished."""

    group: str
    topic: str
    partitions: int
    lag: int


def groups(settings: Settings) -> dict[str, list[str]]:
    """The consumer groups and what each reads to its end."""
    return {
        "dispatch": [topics.requests_name(model) for model in settings.models],
        "settle": [topics.RESULTS],
        "sink": [topics.OUTPUTS, topics.ERRORS],
        "meter": [topics.USAGE],
    }


def lag(admin: Admin, settings: Settings) -> list[Lag]:
    """Per group and topic: committed offsets first, then end offsets, so that it is never too small.

    A group that has committed nothing in a partition is behind by all that the partition still has.
    Blocks for a few round trips; raises KafkaFailed.
    """
    found = []
    for group, names in groups(settings).items():
        counts = admin.partitions(names)
        partitions = [(name, number) for name, count in counts.items() for number in range(count)]
        committed = admin.committed(group, partitions)
        first = admin.first_offsets(partitions)
        ends = admin.end_offsets(partitions)
        for name, count in counts.items():
            own: list[TopicPartition] = [(name, number) for number in range(count)]
            behind = sum(ends[at] - max(committed.get(at, 0), first[at]) for at in own)
            found.append(Lag(group, name, count, behind))
    return found
