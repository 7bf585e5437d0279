"""One organization's huge batch beside small ones of a hundred others."""

from __future__ import annotations

import pytest

from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch
from tests.support.pipeline import record
from tests.support.simulator import Simulator
from tests.support.until import until

ORGANIZATIONS = 100
SMALL = 10
HUGE = 15_000
SLOTS = 50
LATENCY_MS = 100
"""500 calls a second: the huge batch alone takes 30 s, the small ones together 2 s."""


@pytest.mark.parametrize("dispatchers", [pytest.param(1, marks=pytest.mark.faults), 4])
def test_a_huge_batch_holds_up_nobody(pipeline: MakePipeline, simulator: Simulator, dispatchers: int) -> None:
    """While there are small ones, most of the slots are theirs, however many share them out."""
    stages = pipeline(LIMITS, slots=SLOTS)
    simulator.control(latency_ms=LATENCY_MS, reset=True)
    stages.start("intake", "dispatch", "settle", "sink")
    stages.start(*(f"dispatch-{number}" for number in range(2, dispatchers + 1)))
    huge = stages.create((record(f"h{i}", "ok huge") for i in range(HUGE)), organization="org_huge")
    calls = simulator.calls
    until(lambda: calls()["prompts"].get("ok huge", 0) > 200, 60, lambda: stages.explain(huge))
    simulator.control(latency_ms=20 * LATENCY_MS)  # little happens until all are there
    small = [
        stages.create((record(f"s{i}", "ok small") for i in range(SMALL)), organization=f"org_{number}")
        for number in range(ORGANIZATIONS)
    ]
    before = calls()["prompts"]
    simulator.control(latency_ms=LATENCY_MS)
    until(lambda: calls()["prompts"].get("ok small", 0) == ORGANIZATIONS * SMALL, 60, "small batches wait")
    meanwhile = calls()["prompts"]["ok huge"] - before["ok huge"]
    left = ORGANIZATIONS * SMALL - before.get("ok small", 0)
    for batch in small:
        state = stages.wait_ended(batch, 60)
        check_batch(state, [f"s{i}" for i in range(SMALL)], stages.lines(batch, "output"), [])
    assert stages.state(huge).settled is None, "the huge batch was no burden"
    print(f"{meanwhile} calls of the huge batch while the small ones had {left}")
    assert meanwhile <= left
    stages.cancel(huge)
    stages.wait_ended(huge)
