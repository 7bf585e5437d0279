"""Making a cluster ready: topics and tables. Every step may be repeated, by several processes at once."""

from __future__ import annotations

from schemas.settings import Settings
from services.warehouse.client import connect
from services.warehouse.migrate import migrate
from streams.kafka.admin import create_topics


def prepare(settings: Settings) -> list[str]:
    """Create topics, then bring the warehouse up to date; returns a line for each thing done.

    Raises KafkaFailed, MigrationError or the ClickHouse client's errors.
    """
    create_topics(settings)
    done = [f"topics for {len(settings.models)} models are in place"]
    client = connect(settings.clickhouse)
    try:
        done += [f"applied migration {name}" for name in migrate(client)]
    finally:
        client.close()
    return done
