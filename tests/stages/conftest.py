"""The stages on the session's broker and warehouse, against one simulated model server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from schemas.settings import Limits, Pool
from services.warehouse.migrate import migrate
from tests.support.broker import EmbeddedBroker
from tests.support.cluster import Cluster
from tests.support.customer import Customer
from tests.support.pipeline import Pipeline
from tests.support.settings import MODEL, settings_for
from tests.support.simulator import Simulator
from tests.support.warehouse import EmbeddedWarehouse

LIMITS = Limits(retry_backoff_s=0.05, expiry_grace_s=2.0, drain_s=10.0)

MakePipeline = Callable[..., Pipeline]


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with Simulator(tmp_path_factory.mktemp("simulator"), "--concurrency", "1000") as running:
        yield running


@pytest.fixture
def customer() -> Iterator[Customer]:
    with Customer() as running:
        yield running


@pytest.fixture(scope="session")
def tables(warehouse: EmbeddedWarehouse) -> EmbeddedWarehouse:
    """The warehouse with its tables."""
    client = warehouse.client()
    migrate(client)
    client.close()
    return warehouse


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage of all pipelines of the session: they share the topics, so also what the facts point to."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture
def pipeline(
    tmp_path: Path,
    shared: Path,
    broker: EmbeddedBroker,
    tables: EmbeddedWarehouse,
    simulator: Simulator,
) -> Iterator[MakePipeline]:
    """Makes a pipeline with the given limits, roles not started."""
    made: list[Pipeline] = []

    def make(
        limits: Limits = LIMITS, *, pool_url: str = "", slots: int = 256, more_pools: Sequence[str] = ()
    ) -> Pipeline:
        settings = settings_for(shared, bootstrap=broker.bootstrap, warehouse_url=tables.url, limits=limits)
        urls = [pool_url or simulator.url, *more_pools]
        pools = tuple(Pool(base_url=url, max_concurrency=slots) for url in urls)
        model = msgspec.structs.replace(settings.models[MODEL], pools=pools)
        settings = msgspec.structs.replace(settings, models={MODEL: model})
        made.append(Pipeline(tmp_path, settings))
        return made[-1]

    simulator.control(latency_ms=0)
    yield make
    for one in made:
        one.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three brokers of a test's own."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    running = Cluster(directory)
    running.start()
    try:
        yield running
    finally:
        running.close()
