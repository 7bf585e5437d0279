"""A record has its attempts once, whoever makes them."""

from __future__ import annotations

import msgspec
import pytest

from schemas import topics
from schemas.ids import BatchId
from schemas.records import DoneSet
from schemas.settings import Limits
from streams.kafka.admin import Admin
from streams.kafka.reader import PositionReader
from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch
from tests.support.pipeline import Pipeline, record
from tests.support.simulator import Simulator
from tests.support.until import until


def written_down(stages: Pipeline, batch: BatchId) -> dict[int, int]:
    """The failed attempts of a batch's records by position, as the log has them."""
    admin = Admin(stages.settings.kafka, "test-done")
    reader = PositionReader(stages.settings.kafka, "test-done", 1)
    found: dict[int, int] = {}
    places = [(topics.DONE, p) for p in range(stages.settings.kafka.partitions)]
    firsts, ends = admin.first_offsets(places), admin.end_offsets(places)
    try:
        for place in places:
            for message in reader.read_to_end(*place, firsts[place], ends[place], 30):
                if message.value is not None:
                    done = msgspec.json.decode(message.value, type=DoneSet)
                    if done.batch == batch:
                        found = done.attempts
    finally:
        reader.close()
    return found


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.faults), "stop"])
def test_attempts_are_counted_over_restarts(pipeline: MakePipeline, simulator: Simulator, how: str) -> None:
    """Three or more have failed when the dispatcher ends: another makes only what is left of five."""
    stages = pipeline(Limits(max_attempts=5, retry_backoff_s=1.0, drain_s=5.0))
    simulator.control(latency_ms=0, reset=True)
    stages.start("intake", "dispatch", "settle", "sink")
    prompt = f"status:500 attempts {how}"
    batch = stages.create([record("r0", prompt)])
    until(lambda: simulator.calls()["prompts"].get(prompt) == 3, 60, lambda: stages.explain(batch))
    if how == "kill":
        until(lambda: written_down(stages, batch).get(0, 0) >= 3, 10, "the attempts are not written down")
    getattr(stages, how)("dispatch")
    unwritten = simulator.calls()["prompts"][prompt] - written_down(stages, batch)[0]
    assert unwritten <= (1 if how == "kill" else 0)
    stages.start("dispatch")
    state = stages.wait_ended(batch)
    error = stages.lines(batch, "error")
    check_batch(state, ["r0"], [], error)
    assert error[0]["response"]["status_code"] == 500
    assert simulator.calls()["prompts"][prompt] == 5 + unwritten
