"""One organization's huge batch beside small ones of a hundred others."""

from __future__ import annotations

import time

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


def test_a_huge_batch_holds_up_nobody(pipeline: MakePipeline, simulator: Simulator) -> None:
    """The small ones have half of the slots at the least, with one dispatcher as with two."""
    stages = pipeline(LIMITS, slots=SLOTS)
    simulator.control(latency_ms=LATENCY_MS, reset=True)
    stages.start("intake", "dispatch", "dispatch-2", "settle", "sink")
    huge = stages.create((record(f"h{i}", f"ok huge {i}") for i in range(HUGE)), organization="org_huge")
    until(lambda: simulator.calls()["count"] > 200, 60, lambda: stages.explain(huge))
    began = time.monotonic()
    small = [
        stages.create(
            (record(f"s{i}", f"ok small {number} {i}") for i in range(SMALL)), organization=f"org_{number}"
        )
        for number in range(ORGANIZATIONS)
    ]
    for batch in small:
        state = stages.wait_ended(batch, 60)
        check_batch(state, [f"s{i}" for i in range(SMALL)], stages.lines(batch, "output"), [])
    took_s = time.monotonic() - began
    assert stages.state(huge).settled is None, "the huge batch was no burden"
    fair_s = 2 * ORGANIZATIONS * SMALL * LATENCY_MS / 1000 / SLOTS
    print(f"{took_s:.1f} s, {fair_s:.1f} s with half of the slots")
    assert took_s < 3 * fair_s
    stages.cancel(huge)
    stages.wait_ended(huge)
