"""What a large batch does to others, and what a kill costs."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import Counter
from typing import Any

from tests.bench.harness import Rig, lines, median_of, rig, timed
from tests.support.until import until

Row = tuple[str, str, str]


def beside_a_large_batch(rounds: int) -> list[Row]:
    """100 records of another organization, and of the same one, while 50,000 wait; against alone."""
    rows: list[Row] = []
    with rig(slots=100, latency_ms=50) as on:
        small = lines(100, "small")

        def run(organization: str) -> float:
            return timed(lambda: on.wait(organization, on.create(organization, small)))

        run("org_b")
        alone, every = median_of(rounds, lambda: run("org_b"))
        rows.append(("100 records alone, 100 slots at 50 ms", f"{alone:.2f} s", _seconds(every)))
        large = on.create("org_a", lines(50_000, "large"))
        until(
            lambda: on.batch("org_a", large)["request_counts"]["completed"] > 500, 120, "large batch is slow"
        )
        for organization, who in (("org_b", "another organization"), ("org_a", "the same organization")):
            beside, every = median_of(rounds, lambda: run(organization))  # noqa: B023
            rows.append(
                (
                    f"100 records of {who} beside 50,000",
                    f"{beside:.2f} s, {beside / alone:.1f} x",
                    _seconds(every),
                )
            )
        seconds = timed(lambda: _cancel(on, large))
        rows.append(("cancel of 50,000 records to cancelled", f"{seconds:.2f} s", ""))
    return rows


def recovery(rounds: int) -> list[Row]:
    """SIGKILL of the dispatcher under load: when the next call leaves, and which are made again."""
    seconds: list[float] = []
    running: list[int] = []
    answered: list[int] = []
    with rig(slots=100, latency_ms=100) as on:
        for round_ in range(rounds):
            since = time.time()
            batch = on.create("org_a", lines(6_000, f"kill{round_}-"))
            until(lambda: on.batch("org_a", batch)["request_counts"]["completed"] > 1_500, 60, "slow")  # noqa: B023
            killed_at = time.time()
            os.kill(on.stack.pid("dispatch"), signal.SIGKILL)
            on.wait("org_a", batch)
            calls = _all_logged(on, since)
            # What was sent just before the kill arrives within the first tenth of a second.
            seconds.append(min(c["t_arrived"] for c in calls if c["t_arrived"] > killed_at + 0.1) - killed_at)
            prompts = Counter(call["prompt"] for call in calls)
            again = [c for c in calls if c["t_arrived"] < killed_at + 0.1 and prompts[c["prompt"]] > 1]
            answered.append(sum(call["status"] == 200 for call in again))
            running.append(len(again) - answered[-1])
            assert len(calls) - len(prompts) == len(again), "a call was made again that was not lost"
    return [
        ("SIGKILL of dispatch to the next call", f"{statistics.median(seconds):.1f} s", _seconds(seconds)),
        (
            "calls made again after it: those running",
            f"{statistics.median(running):.0f}",
            f"{running} of 100 slots",
        ),
        ("and those whose answer was not in the log", f"{statistics.median(answered):.0f}", str(answered)),
    ]


def many_batches(rounds: int) -> list[Row]:
    """20,000 records as 1, 20 and 200 batches: the whole way, and how fast they run once all are open."""
    rows: list[Row] = []
    with rig() as on:
        on.wait("org_a", on.create("org_a", lines(100)))
        for count in (1, 20, 200):
            found = [_run_open_together(on, count, 20_000) for _ in range(rounds)]
            rate = statistics.median(found)
            every = ", ".join(f"{each:,.0f}" for each in found)
            rows.append((f"20,000 records, {count} batches open", f"{rate:,.0f} records/s", every))
    return rows


def _run_open_together(on: Rig, count: int, records: int) -> float:
    """Records/s from when all batches are open, and the pool fast again, to the last call's end."""
    slow_s = 2.0
    on.simulator.control(latency_ms=slow_s * 1000)
    data = lines(records // count)
    batches = [on.create("org_a", data) for _ in range(count)]
    on.simulator.control(latency_ms=0)
    opened = time.time()
    for batch in batches:
        on.wait("org_a", batch)
    # Calls that began while the pool was slow hold their slots until then.
    ends = [call["t_end"] for call in _all_logged(on, 0) if call["t_end"] > opened + slow_s]
    return len(ends) / (max(ends) - opened - slow_s)


def _all_logged(on: Rig, since: float) -> list[dict[str, Any]]:
    """The log of calls with the last that was counted; it is written a little behind."""
    count = on.simulator.calls()["count"]
    until(lambda: len(on.simulator.logged(0)) >= count, 10, "the log of calls lacks some")
    return on.simulator.logged(since)


def _cancel(on: Rig, batch: str) -> None:
    on.clients["org_a"].post(f"/batches/{batch}/cancel").raise_for_status()
    on.wait("org_a", batch)


def _seconds(figures: list[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures) + " s"
