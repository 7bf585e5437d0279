"""Lag by partition, with how long the oldest record has been waiting."""

from __future__ import annotations

import time

import msgspec

from schemas.settings import Settings
from services.control.lag import PartitionLag, partition_lags
from services.operator.log import Log


class Waiting(msgspec.Struct, frozen=True):
    """`committed` is -1 when the group has committed nothing; `oldest_s` None when nothing waits."""

    group: str
    topic: str
    partition: int
    committed: int
    end: int
    lag: int
    oldest_s: float | None


def waiting(settings: Settings) -> list[Waiting]:
    """Every partition that any group reads. Blocks; raises KafkaFailed."""
    with Log(settings.kafka) as log:
        return [_waiting(log, row) for row in partition_lags(log.admin)]


def _waiting(log: Log, row: PartitionLag) -> Waiting:
    oldest_s = None
    if row.lag:
        oldest = log.one(row.topic, row.partition, row.end - row.lag)
        oldest_s = max(0.0, time.time() - oldest.timestamp_ms / 1000)
    return Waiting(row.group, row.topic, row.partition, row.committed, row.end, row.lag, oldest_s)
