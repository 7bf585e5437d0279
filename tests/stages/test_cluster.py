"""A broker of three is killed under a batch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from schemas.settings import Pool
from tests.stages.conftest import LIMITS
from tests.support.check import check_batch
from tests.support.cluster import NODES, Cluster
from tests.support.pipeline import Pipeline, record
from tests.support.settings import MODEL, settings_for
from tests.support.simulator import Simulator
from tests.support.until import until

RECORDS = 16_000
SLOTS = 24

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_each_broker_is_killed_once_under_a_batch(
    tmp_path: Path, cluster: Cluster, simulator: Simulator
) -> None:
    settings = settings_for(tmp_path, bootstrap=cluster.bootstrap, pool_url=simulator.url, limits=LIMITS)
    pools = (Pool(base_url=simulator.url, max_concurrency=SLOTS),)
    settings = msgspec.structs.replace(
        settings,
        kafka=msgspec.structs.replace(settings.kafka, replication_factor=3),
        models={MODEL: msgspec.structs.replace(settings.models[MODEL], pools=pools)},
    )
    simulator.control(latency_ms=100)
    stages = Pipeline(tmp_path, settings)
    try:
        stages.start("intake", "dispatch", "settle", "sink")
        before = simulator.calls()["count"]
        batch = stages.create(record(f"r{i}", f"ok cluster {i}") for i in range(RECORDS))
        for node in NODES:
            seen = simulator.calls()["count"]
            until(
                lambda seen=seen: stages.revived() and simulator.calls()["count"] > seen + 500,
                60,
                "no progress",
            )  # type: ignore[misc]
            cluster.kill(node)
            seen = simulator.calls()["count"]
            until(
                lambda seen=seen: stages.revived() and simulator.calls()["count"] > seen + 300,  # type: ignore[misc]
                60,
                lambda node=node: f"no calls after broker {node} was killed\n{stages.explain(batch)}",  # type: ignore[misc]
            )
            cluster.start(node)
            until(cluster.in_sync, 60, "the copies do not catch up")
        until(
            lambda: stages.revived() and stages.state(batch).ended is not None,
            180,
            lambda: stages.explain(batch),
        )
        state = stages.state(batch)
        check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
        assert simulator.calls()["count"] - before - RECORDS <= SLOTS * len(NODES)
    finally:
        stages.close()
