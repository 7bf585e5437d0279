"""What a large batch does to others, and what a kill costs."""

from __future__ import annotations

import os
import signal
import time

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
    """SIGKILL of the dispatcher under load: when the next call leaves, and how many are made again."""
    rows: list[Row] = []
    with rig(slots=100, latency_ms=100) as on:
        seconds: list[float] = []
        repeated: list[int] = []
        for _ in range(rounds):
            since = time.time()
            before = on.simulator.calls()["count"]
            batch = on.create("org_a", lines(6_000))
            until(lambda: on.batch("org_a", batch)["request_counts"]["completed"] > 1_500, 60, "slow")  # noqa: B023
            killed_at = time.time()
            os.kill(on.stack.pid("dispatch"), signal.SIGKILL)
            on.wait("org_a", batch)
            time.sleep(0.2)  # the call log is written a little behind
            calls = on.simulator.logged(since)
            # What was sent just before the kill arrives within the first tenth of a second.
            seconds.append(min(c["t_arrived"] for c in calls if c["t_arrived"] > killed_at + 0.1) - killed_at)
            repeated.append(on.simulator.calls()["count"] - before - 6_000)
        rows.append(
            (
                "SIGKILL of dispatch to the next call",
                f"{sorted(seconds)[rounds // 2]:.1f} s",
                _seconds(seconds),
            )
        )
        rows.append(
            ("calls repeated after it, of 100 in flight", str(sorted(repeated)[rounds // 2]), str(repeated))
        )
    return rows


def many_batches(rounds: int) -> list[Row]:
    """20,000 records as 1 batch, and as 200 batches that are open together."""
    rows: list[Row] = []
    with rig() as on:
        on.wait("org_a", on.create("org_a", lines(100)))
        for count in (1, 20, 200):
            data = lines(20_000 // count)

            def run() -> None:
                batches = [on.create("org_a", data) for _ in range(count)]  # noqa: B023
                for batch in batches:
                    on.wait("org_a", batch)

            seconds, every = median_of(rounds, lambda: timed(run))
            rows.append(
                (f"20,000 records as {count} batches", f"{20_000 / seconds:,.0f} records/s", _seconds(every))
            )
    return rows


def _cancel(on: Rig, batch: str) -> None:
    on.clients["org_a"].post(f"/batches/{batch}/cancel").raise_for_status()
    on.wait("org_a", batch)


def _seconds(figures: list[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures) + " s"
