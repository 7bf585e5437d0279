"""ClickHouse is away while batches run."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from schemas import topics
from schemas.settings import ClickHouse
from services.control.lag import by_topic, partition_lags
from services.warehouse.migrate import migrate
from streams.kafka.admin import Admin
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import Pipeline, record
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

RECORDS = 1_000

pytestmark = pytest.mark.faults


@pytest.fixture
def own_warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWarehouse]:
    running = EmbeddedWarehouse(tmp_path_factory.mktemp("down"))
    running.start()
    client = running.client()
    migrate(client)
    client.close()
    try:
        yield running
    finally:
        running.stop()


def unmetered(stages: Pipeline, admin: Admin) -> int:
    """Messages of usage that the meter has not finished."""
    lags = by_topic(partition_lags(admin))
    return sum(each.lag for each in lags if (each.group, each.topic) == ("meter", topics.USAGE))


def test_batches_end_while_the_warehouse_is_away_and_are_billed_when_it_is_back(
    pipeline: MakePipeline, own_warehouse: EmbeddedWarehouse
) -> None:
    stages = pipeline(LIMITS)
    settings = msgspec.structs.replace(stages.settings, clickhouse=ClickHouse(url=own_warehouse.url))
    stages.config.write_bytes(msgspec.json.encode(settings))
    admin = Admin(settings.kafka, "test-lag")
    stages.start("intake", "dispatch", "settle", "sink", "meter")
    until(lambda: unmetered(stages, admin) == 0, 60, lambda: stages.tail("meter"))
    own_warehouse.kill()
    batches = [
        stages.create(record(f"r{i}", f"usage:{i % 9}/{i % 5} down {number} {i}") for i in range(RECORDS))
        for number in range(2)
    ]
    for batch in batches:
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
    until(lambda: unmetered(stages, admin) >= 2, 30, lambda: f"the lag is {unmetered(stages, admin)}")
    assert stages.children["meter"].poll() is None
    own_warehouse.start()
    client = own_warehouse.client()
    for batch in batches:
        until(
            lambda batch=batch: (  # type: ignore[misc]
                client.query(f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'").first_row[0]
                >= RECORDS
            ),
            60,
            lambda: f"rows are missing\n{stages.tail('meter')}",
        )
        check_ledger(client, stages.state(batch))
    assert not client.query("SELECT * FROM billing.conflicting_duplicates").result_rows
    client.close()
    until(lambda: unmetered(stages, admin) == 0, 30, lambda: f"the lag is {unmetered(stages, admin)}")
