"""What the roles show while a batch runs, through the control host, and a batch that cannot go on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from schemas.ids import BatchId
from schemas.settings import Limits
from streams.metrics import CATALOGUE
from tests.stages.conftest import MakePipeline
from tests.support.control import ControlHost
from tests.support.pipeline import Pipeline, record
from tests.support.settings import API_KEY, MODEL
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

ROLES = ("intake", "dispatch", "settle", "sink", "meter")

Samples = dict[tuple[str, tuple[str, ...]], float]


def shown(control: ControlHost) -> Samples:
    """Every sample of our own: its name and the values of its labels but the role, in order of the names."""
    text = httpx.get(f"{control.url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {
                k: v for k, v in sample.labels.items() if k != "role" or family.name.endswith("role_up")
            }
            key = (sample.name, tuple(value for _, value in sorted(labels.items())))
            found[key] = found.get(key, 0) + sample.value
    return found


@pytest.fixture
def control(tmp_path: Path) -> Iterator[list[ControlHost]]:
    started: list[ControlHost] = []
    yield started
    for each in started:
        each.stop()


def start_control(stages: Pipeline, started: list[ControlHost]) -> ControlHost:
    host = ControlHost(stages.directory, stages.settings)
    host.start()
    started.append(host)
    return host


def test_a_batch_is_counted_at_every_stage(
    pipeline: MakePipeline, simulator: Simulator, control: list[ControlHost]
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    host = start_control(stages, control)
    batch = stages.create(
        record(f"r{i}", prompt)
        for i, prompt in enumerate(["status:400 shown", "drop shown", *[f"ok shown {i}" for i in range(48)]])
    )
    stages.wait_ended(batch)
    endpoint = f"127.0.0.1:{simulator.port}"

    def counted() -> bool:
        now = shown(host)
        # Who was a dispatcher before this one may keep its share until its session ends.
        whole = now.get(("openrelay_dispatch_max_slots", (endpoint, MODEL))) == 256
        return whole and now.get(("openrelay_meter_rows_total", ("billing.usage_events",)), 0) >= 48

    until(counted, 60, lambda: f"the meter's rows or all slots are not shown: {shown(host)}")
    now = shown(host)
    assert now[("openrelay_dispatch_calls_total", (MODEL, "2xx"))] >= 48
    assert now[("openrelay_dispatch_calls_total", (MODEL, "4xx"))] >= 1
    assert now[("openrelay_dispatch_calls_total", (MODEL, "broken"))] >= 5
    assert now[("openrelay_dispatch_retries_total", (MODEL,))] >= 4
    assert now[("openrelay_dispatch_call_seconds_count", (MODEL,))] >= 54
    assert now[("openrelay_dispatch_slots", (endpoint, MODEL))] > 0
    assert now[("openrelay_dispatch_stuck_records", (MODEL,))] == 0
    assert now[("openrelay_settle_verdicts_total", ("output",))] >= 48
    assert now[("openrelay_settle_verdicts_total", ("error",))] >= 2
    assert now[("openrelay_settle_batches_total", ("done",))] >= 1
    assert now[("openrelay_sink_merges_total", ("ended",))] >= 1
    assert now[("openrelay_sink_segments_total", ())] >= 2
    assert now[("openrelay_lag_records", ("settle", "0", "results"))] == 0
    for role in ("dispatch", "settle", "sink", "meter"):
        assert now[("openrelay_role_up", (role,))] == 1
    ours = {name for name, _ in now if name.startswith("openrelay_")}
    known = {entry.name.removesuffix("_total") for entry in CATALOGUE}
    assert {re.sub(r"_(total|created|count|sum|bucket)$", "", name) for name in ours} <= known
    page = httpx.get(host.url, headers={"x-api-key": API_KEY}, trust_env=False).raise_for_status().text
    assert batch in page
    assert endpoint in page
    stages.kill("sink")
    until(lambda: shown(host)[("openrelay_role_up", ("sink",))] == 0, 60, "the dead sink is not shown")


def test_prices_and_lag_are_written_down(
    pipeline: MakePipeline, tables: EmbeddedWarehouse, control: list[ControlHost]
) -> None:
    stages = pipeline()
    host = start_control(stages, control)
    client = tables.client()
    sql = f"SELECT DISTINCT tier, bps FROM billing.prices WHERE model = '{MODEL}' ORDER BY bps"
    until(lambda: client.query(sql).row_count, 30, "no price is recorded")
    assert client.query(sql).result_rows == [("standard", 5_000), ("expedited", 10_000)]
    sql = "SELECT partition, committed, end_offset, lag FROM billing.lag_samples WHERE group_id = 'settle'"
    partitions = stages.settings.kafka.partitions
    until(lambda: client.query(sql).row_count >= partitions, 30, "no lag is written down")
    for partition, committed, end, lag in client.query(sql).result_rows:
        assert 0 <= partition < partitions
        assert lag == end - max(committed, 0)
    client.close()
    oldest = ("openrelay_lag_oldest_seconds", ("settle", "results"))
    until(lambda: shown(host).get(oldest, -1) >= 0, 30, "the age of the oldest record is not shown")


def delete_records(stages: Pipeline, batch: BatchId) -> list[int]:
    """Let the request topic begin behind the batch's records; the partitions they were in."""
    enqueued = stages.state(batch).enqueued
    assert enqueued is not None
    begins = [TopicPartition(enqueued.topic, p, runs[-1][1] + 1) for p, runs in enqueued.extents.items()]
    admin = AdminClient({"bootstrap.servers": stages.settings.kafka.bootstrap})
    for deleted in admin.delete_records(begins).values():
        deleted.result(30)
    return list(enqueued.extents)


@pytest.mark.faults
def test_a_record_that_is_passed_over_is_counted_and_named(
    pipeline: MakePipeline, control: list[ControlHost]
) -> None:
    """Its place in the request topic is gone: it is read for again and again, and never starts."""
    stages = pipeline(Limits(stuck_after_s=2.0, expiry_grace_s=1.0, drain_s=5.0))
    stages.start("intake")
    batch = stages.create((record(f"r{i}", "ok passed over") for i in range(10)), window_s=25.0)
    until(lambda: stages.state(batch).enqueued is not None, 60, lambda: stages.explain(batch))
    [partition] = delete_records(stages, batch)
    stages.start("dispatch")
    host = start_control(stages, control)
    key = ("openrelay_dispatch_stuck_records", (MODEL,))
    until(lambda: shown(host).get(key) == 10, 20, lambda: stages.tail("dispatch"))
    said = [json.loads(line) for line in stages.log("dispatch").read_text("utf-8").splitlines()]
    [stuck] = [line for line in said if line["event"] == "record stuck"]
    assert (stuck["batch"], stuck["partition"], stuck["position"]) == (batch, partition, 0)
    stages.start("settle", "sink")
    stages.wait_ended(batch)
    until(lambda: shown(host)[key] == 0, 60, "it is still called stuck")
