"""Lag, written down once a minute, so that charts of it survive restarts (`billing.lag_samples`, 30 days).

A minute without broker or warehouse has no sample. Two control hosts write the same rows twice a minute; rows
of one second collapse, and a chart does not mind the rest.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

from clickhouse_connect.driver.exceptions import ClickHouseError

from schemas.settings import Settings
from services.control.lag import PartitionLag, partition_lags
from services.warehouse.client import connect
from streams.kafka.admin import Admin
from streams.kafka.messages import KafkaFailed

EVERY_S = 60.0
COLUMNS = ["sampled_at", "group_id", "topic", "partition", "committed", "end_offset", "lag"]

log = logging.getLogger("openrelay.control")


async def keep_sampling(settings: Settings, admin: Admin) -> None:
    """Runs until cancelled."""
    while True:
        try:
            lags = await asyncio.to_thread(partition_lags, admin, settings)
            await asyncio.to_thread(write, settings, lags, datetime.now(UTC))
        except (KafkaFailed, ClickHouseError) as error:
            log.warning("no sample of the lag: %s", str(error).splitlines()[0][:300])
        await asyncio.sleep(EVERY_S)


def write(settings: Settings, lags: list[PartitionLag], now: datetime) -> None:
    """Blocks; raises the ClickHouse client's errors."""
    client = connect(settings.clickhouse)
    try:
        rows = [[now, row.group, row.topic, row.partition, row.committed, row.end, row.lag] for row in lags]
        client.insert("billing.lag_samples", rows, column_names=COLUMNS, settings={"async_insert": 0})
    finally:
        client.close()
