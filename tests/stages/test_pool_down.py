"""The model servers are away for long while a large backlog waits, or ask to be left alone for a while."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from schemas.topics import requests_name
from services.control.lag import partition_lags
from streams.kafka.admin import Admin
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch
from tests.support.pipeline import Pipeline, record
from tests.support.settings import MODEL
from tests.support.simulator import Simulator
from tests.support.until import until

RECORDS = 20_000
DOWN_S = 15.0
"""Longer than two sessions of a member that would not poll, and than an endpoint's first seven tries."""

SLOTS = 64
REFUSED_S = 3.0


def lag(stages: Pipeline, admin: Admin) -> int:
    topic = requests_name(MODEL)
    return sum(each.lag for each in partition_lags(admin) if each.topic == topic)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_pool_is_down_and_twenty_thousand_records_wait(
    pipeline: MakePipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Memory stays flat, no record fails, the dispatcher stays a member, and the lag is all that waits."""
    late = Simulator(tmp_path_factory.mktemp("late"), "--concurrency", "1000")
    stages = pipeline(LIMITS, pool_url=late.url)
    admin = Admin(stages.settings.kafka, "test-lag")
    stages.start("intake", "dispatch", "settle", "sink")
    padding = "x" * 2_000
    batch = stages.create(record(f"r{i}", f"ok down {i} {padding}") for i in range(RECORDS))
    until(lambda: stages.state(batch).enqueued is not None, 60, lambda: stages.explain(batch))
    until(lambda: lag(stages, admin) == RECORDS, 30, lambda: f"the lag is {lag(stages, admin)}")
    process = psutil.Process(stages.children["dispatch"].pid)
    resident = [process.memory_info().rss]
    ends = time.monotonic() + DOWN_S
    while time.monotonic() < ends:
        time.sleep(0.5)  # the fault's length, looked at meanwhile
        resident.append(process.memory_info().rss)
        assert lag(stages, admin) == RECORDS
    assert max(resident) <= 1.2 * min(resident), [each >> 20 for each in resident]
    said = stages.log("dispatch").read_text("utf-8")
    assert "partitions lost" not in said
    assert "membership begins anew" not in said
    with late:
        until(lambda: late.calls()["count"], 35, lambda: f"nothing is called\n{stages.explain(batch)}")
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
        assert late.calls()["count"] == RECORDS
        until(lambda: lag(stages, admin) == 0, 30, lambda: f"the lag is {lag(stages, admin)}")
        print("resident MiB", resident[0] >> 20, max(resident) >> 20, process.memory_info().rss >> 20)


def test_nothing_is_tried_again_before_the_time_the_server_asked_for(
    pipeline: MakePipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every record is refused once; afterwards fewer calls are made at once, and none fails.

    All are under way before the first is refused: whoever came later would be refused alone, one each pause.
    """
    busy = Simulator(tmp_path_factory.mktemp("busy"))
    busy.options = ("--call-log", str(busy.log), "--latency-ms", "300", "--concurrency", "500")
    with busy:
        stages = pipeline(LIMITS, pool_url=busy.url, slots=SLOTS)
        stages.start("intake", "dispatch", "settle", "sink")
        prompts = [f"retry-after:{REFUSED_S:g}:1 busy {i}" for i in range(SLOTS)]
        batch = stages.create(record(f"r{i}", prompt) for i, prompt in enumerate(prompts))
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(SLOTS)], stages.lines(batch, "output"), [])
        arrivals: dict[str, list[dict[str, Any]]] = {}
        for call in busy.logged(0.0):
            arrivals.setdefault(call["marker"], []).append(call)
        assert set(arrivals) == set(prompts)
        for first, second in arrivals.values():
            assert (first["status"], second["status"]) == (429, 200)
            assert second["t_arrived"] - first["t_end"] >= REFUSED_S
        tries = [second for _, second in arrivals.values()]
        answered_at = min(second["t_end"] for second in tries)  # from then on the refusals are won back
        at_once = [second["concurrency"] for second in tries if second["t_arrived"] < answered_at]
        assert max(at_once) <= SLOTS * 3 // 4


def test_who_refuses_does_not_swallow_what_another_could_do(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One server refuses at once and asks for an hour, the other answers: nothing waits for the hour."""
    with Simulator(tmp_path_factory.mktemp("refusing")) as refusing:
        refusing.control(behaviour="retry-after:3600:1000")
        stages = pipeline(LIMITS, slots=8, more_pools=[refusing.url])
        simulator.control(latency_ms=20)
        stages.start("intake", "dispatch", "settle", "sink")
        ids = [f"r{i}" for i in range(400)]
        batch = stages.create(record(name, f"refused {name}") for name in ids)
        state = stages.wait_ended(batch, 60)
        check_batch(state, ids, stages.lines(batch, "output"), [])
        assert refusing.calls()["count"] <= 4 * 8


def test_a_server_that_always_refuses_is_asked_seldom(
    pipeline: MakePipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the number of records: each would be refused."""
    with Simulator(tmp_path_factory.mktemp("refusing")) as refusing:
        refusing.control(behaviour="retry-after:2:1000")
        stages = pipeline(LIMITS, pool_url=refusing.url, slots=8)
        stages.start("intake", "dispatch", "settle", "sink")
        ids = [f"r{i}" for i in range(2_000)]
        batch = stages.create(record(name, f"refused {name}") for name in ids)
        until(lambda: refusing.calls()["count"] > 8, 30, lambda: stages.explain(batch))
        time.sleep(6)  # the time of three calls, each of which is refused
        assert refusing.calls()["count"] <= 4 * 8
        refusing.control(behaviour="ok")
        state = stages.wait_ended(batch)
        check_batch(state, ids, stages.lines(batch, "output"), [])
