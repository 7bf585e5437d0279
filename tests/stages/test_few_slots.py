"""Fewer slots than partitions, or than dispatchers: everything runs, and never more at once than allowed."""

from __future__ import annotations

import msgspec
import pytest

from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch
from tests.support.pipeline import Pipeline, record
from tests.support.settings import MODEL
from tests.support.simulator import Simulator
from tests.support.until import until

RECORDS = 100
"""Enough to lie in every partition."""


def limit(stages: Pipeline, *slots: int) -> None:
    """Give the model's endpoints so many slots each, and wait until every dispatcher knows."""
    model = stages.settings.models[MODEL]
    pools = tuple(
        msgspec.structs.replace(pool, max_concurrency=count)
        for pool, count in zip(model.pools, slots, strict=True)
    )
    models = {MODEL: msgspec.structs.replace(model, pools=pools)}
    dispatchers = [name for name in stages.children if name.startswith("dispatch")]
    before = {name: times_read(stages, name) for name in dispatchers}
    stages.reconfigure(msgspec.structs.replace(stages.settings, models=models))
    until(
        lambda: all(times_read(stages, name) > before[name] for name in dispatchers),
        30,
        "the settings were not read again",
    )


def times_read(stages: Pipeline, name: str) -> int:
    return stages.log(name).read_text("utf-8").count("settings read again")


def test_any_number_of_slots_and_dispatchers_finishes(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline(slots=8)
    simulator.control(latency_ms=2)
    stages.start("intake", "settle", "sink")
    for dispatchers in ("dispatch", "dispatch-2", "dispatch-3"):
        stages.start(dispatchers)
        for slots in (1, 2, 3, 4, 5):
            limit(stages, slots)
            simulator.control(reset=True)
            batch = stages.create(record(f"r{i}", f"ok few {i}") for i in range(RECORDS))
            state = stages.wait_ended(batch, 30)
            check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
            assert 1 <= simulator.stats()["peak_open"] <= slots
            assert simulator.calls()["count"] == RECORDS


def test_two_endpoints_of_one_slot_each(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whichever is out of service, the other runs every partition."""
    other = Simulator(tmp_path_factory.mktemp("other"))
    stages = pipeline(slots=1, more_pools=[other.url])
    simulator.control(latency_ms=0, reset=True)
    stages.start("intake", "settle", "sink", "dispatch", "dispatch-2")
    batch = stages.create(record(f"r{i}", f"ok pair {i}") for i in range(RECORDS))
    state = stages.wait_ended(batch, 30)
    check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
    assert simulator.stats()["peak_open"] == 1


@pytest.mark.faults
def test_slots_are_taken_away_and_given_back_under_a_batch(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    """Partitions change hands with the settings: nothing waits for ever, runs twice, or beyond the limit."""
    stages = pipeline(slots=8)
    simulator.control(latency_ms=20, reset=True)
    stages.start("intake", "settle", "sink", "dispatch", "dispatch-2", "dispatch-3")
    count = 1_200
    batch = stages.create(record(f"r{i}", f"ok taken {i}") for i in range(count))
    until(lambda: simulator.calls()["count"] > 100, 30, "no calls")
    for slots in (1, 3, 8, 2):
        limit(stages, slots)
        until(lambda slots=slots: simulator.stats()["running"] <= slots, 30, "too many are running")  # type: ignore[misc]
        seen = simulator.calls()["count"]
        until(
            lambda seen=seen: simulator.calls()["count"] >= seen + 100,  # type: ignore[misc]
            60,
            lambda slots=slots: f"no calls with {slots} slots\n{stages.explain(batch)}",  # type: ignore[misc]
        )
        assert simulator.stats()["running"] <= slots
    state = stages.wait_ended(batch)
    check_batch(state, [f"r{i}" for i in range(count)], stages.lines(batch, "output"), [])
    assert simulator.calls()["count"] == count
    assert simulator.stats()["peak_open"] <= 8
