"""Lag, looked at once a minute: written down for charts, and watched before the log forgets.

Samples go to `billing.lag_samples`, so that charts survive restarts; a minute without broker or warehouse has
none. Two control hosts each write their own, which a chart does not mind.

A record that has waited for most of its topic's retention is about to be deleted unread: that is an error in
the log, and `openrelay_lag_oldest_seconds` shows it coming.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime

from clickhouse_connect.driver.exceptions import ClickHouseError

from schemas.settings import Settings
from schemas.topics import CATALOGUE, REQUESTS_PREFIX, requests_topic
from services.operator.waiting import Waiting, waiting
from services.warehouse.client import connect
from streams import metrics
from streams.kafka.messages import KafkaFailed

EVERY_S = 60.0
ALARM_AT = 0.75
"""Share of a topic's retention that its oldest waiting record may be old."""

COLUMNS = ["sampled_at", "group_id", "topic", "partition", "committed", "end_offset", "lag"]

log = logging.getLogger("openrelay.control")


async def keep_sampling(settings: Settings) -> None:
    """Runs until cancelled."""
    while True:
        try:
            rows = await asyncio.to_thread(waiting, settings)
            show(rows)
            await asyncio.to_thread(write, settings, rows, datetime.now(UTC))
        except (KafkaFailed, ClickHouseError) as error:
            log.warning("no sample of the lag: %s", str(error).splitlines()[0][:300])
        await asyncio.sleep(EVERY_S)


def show(rows: Iterable[Waiting]) -> None:
    """The age of what waits longest, and an alarm where the log will soon forget it."""
    oldest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.group, row.topic)
        oldest[key] = max(oldest.get(key, 0.0), row.oldest_s or 0.0)
    for (group, topic), seconds in oldest.items():
        metrics.LAG_OLDEST.labels(group, topic).set(seconds)
        kept_s = retention_s(topic)
        if kept_s is not None and seconds > kept_s * ALARM_AT:
            log.error(
                "%s is %.1f h behind in %s, which keeps records for %.1f h",
                group,
                seconds / 3600,
                topic,
                kept_s / 3600,
            )


def retention_s(topic: str) -> float | None:
    """How long a topic keeps a record; None when it does not forget."""
    known = {each.name: each for each in CATALOGUE}
    found = requests_topic("any") if topic.startswith(REQUESTS_PREFIX) else known[topic]
    kept_ms = found.config.get("retention.ms")
    return None if kept_ms is None else int(kept_ms) / 1000


def write(settings: Settings, rows: Iterable[Waiting], now: datetime) -> None:
    """Blocks; raises the ClickHouse client's errors."""
    client = connect(settings.clickhouse)
    try:
        client.insert(
            "billing.lag_samples",
            [[now, row.group, row.topic, row.partition, row.committed, row.end, row.lag] for row in rows],
            column_names=COLUMNS,
            settings={"async_insert": 0},
        )
    finally:
        client.close()
