"""Making a cluster ready: topics and tables. Every step may be repeated, by several processes at once."""

from __future__ import annotations

import clickhouse_connect

from schemas.settings import Settings
from services.warehouse.migrate import migrate
from streams.kafka.admin import create_topics


def prepare(settings: Settings) -> list[str]:
    """Create topics, then bring the warehouse up to date; returns a line for each thing done.

    Raises KafkaFailed, MigrationError or the ClickHouse client's errors.
    """
    create_topics(settings)
    done = [f"topics for {len(settings.models)} models are in place"]
    client = clickhouse_connect.get_client(dsn=settings.clickhouse.url, autogenerate_session_id=False)
    try:
        done += [f"applied migration {name}" for name in migrate(client)]
    finally:
        client.close()
    return done
