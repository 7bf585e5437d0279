"""End to end: records/s, use of a pool, CPU and memory by role."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable

from tests.bench.harness import TERMINAL, Rig, lines, median_of, rig, timed

Row = tuple[str, str, str]


def throughput(rounds: int) -> list[Row]:
    """Upload to terminal status, zero-latency pool."""
    rows: list[Row] = []
    with rig() as on:
        on.wait("org_a", on.create("org_a", lines(100)))
        for count in (1_000, 5_000, 20_000, 50_000):
            data = lines(count)
            before = on.cpu()
            seconds, every = median_of(rounds, lambda: _run(on, data))  # noqa: B023
            cpu = {role: (used - before[role]) * 1000 / (count * rounds) for role, used in on.cpu().items()}
            rows.append(
                (f"{count:,} records end to end", f"{count / seconds:,.0f} records/s", _all(every, "s"))
            )
            shares = ", ".join(f"{role} {ms:.2f}" for role, ms in sorted(cpu.items(), key=lambda i: -i[1]))
            rows.append(
                (f"CPU a record at {count:,}, ms", f"{sum(cpu.values()) - cpu['simulator']:.2f}", shares)
            )
        peak = ", ".join(f"{role} {mib}" for role, mib in on.memory().items())
        rows.append(("peak resident memory, MiB", "", peak))
    return rows


def two_dispatchers(rounds: int) -> list[Row]:
    with rig(dispatchers=2) as on:
        on.wait("org_a", on.create("org_a", lines(100)))
        data = lines(50_000)
        seconds, every = median_of(rounds, lambda: _run(on, data))
    return [("50,000 records, two dispatchers", f"{50_000 / seconds:,.0f} records/s", _all(every, "s"))]


def creation(rounds: int) -> list[Row]:
    """Upload and create of 50,000 records, apart."""
    data = lines(50_000, size=3_990)
    rows: list[Row] = []
    with rig(slots=1, latency_ms=60_000) as on:
        client = on.clients["org_a"]
        files: list[str] = []

        def upload() -> None:
            answer = client.post("/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch"})
            files.append(answer.raise_for_status().json()["id"])

        def create() -> None:
            body = {
                "input_file_id": files[-1],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
            client.post("/batches", json=body).raise_for_status()

        before = on.memory()["api"]
        size = f"{len(data) / 1e6:.0f} MB"
        seconds, every = median_of(rounds, lambda: timed(upload))
        rows.append((f"upload of 50,000 records, {size}", f"{seconds:.2f} s", _all(every, "s")))
        seconds, every = median_of(rounds, lambda: timed(create))
        rows.append((f"create of 50,000 records, {size}", f"{seconds:.2f} s", _all(every, "s")))
        rows.append(("growth of the API by it, MiB", str(on.memory()["api"] - before), "peak resident"))
        other, worst = _others_meanwhile(on, rounds, upload)
        rows.append(("another request while a file is uploaded", f"{other:.0f} ms", f"worst {worst:.0f} ms"))
        other, worst = _others_meanwhile(on, rounds, create)
        rows.append(("another request while a batch is created", f"{other:.0f} ms", f"worst {worst:.0f} ms"))
    return rows


def utilisation(rounds: int) -> list[Row]:
    """2,000 records of 1 s on 200 slots take 10 s at best."""
    rows: list[Row] = []
    with rig(slots=200, latency_ms=1_000) as on:
        on.wait("org_a", on.create("org_a", lines(10)))
        data = lines(2_000)

        def used() -> float:
            since = time.time()
            batch = on.create("org_a", data)
            # Asked as seldom as callers do: every answer costs the API and the broker a look at the log.
            while (ended := on.batch("org_a", batch))["status"] not in TERMINAL:
                time.sleep(0.5)
            assert ended["request_counts"]["completed"] == 2_000
            calls = on.simulator.logged(since)
            span = max(call["t_end"] for call in calls) - min(call["t_arrived"] for call in calls)
            return 100 * sum(call["t_end"] - call["t_arrived"] for call in calls) / (200 * span)

        share, every = median_of(rounds, used)
        rows.append(("pool of 200 slots at 1 s, 2,000 records", f"{share:.1f} % used", _all(every, "%")))
        on.simulator.control(latency_ms=1_000, latency_sigma=1.0)
        share, every = median_of(rounds, lambda: _mean_running(on, data))
        rows.append(
            (
                "the same at log-normal latencies, sigma 1",
                f"{share:.1f} % used",
                "mean over the batch's middle",
            )
        )
    return rows


def in_flight(rounds: int) -> list[Row]:
    """2,000 calls at once in one dispatcher."""
    count, slots = 10_000, 2_000
    with rig(slots=slots, latency_ms=2_000) as on:
        on.wait("org_a", on.create("org_a", lines(10)))
        data = lines(count)
        before = on.cpu()["dispatch"]
        seconds, every = median_of(rounds, lambda: _run(on, data))
        used_ms = (on.cpu()["dispatch"] - before) * 1000 / (count * rounds)
        ideal = count * 2.0 / slots
        peak = on.memory()["dispatch"]
    return [
        (
            f"{count:,} records at 2 s, {slots:,} slots",
            f"{seconds:.1f} s, ideal {ideal:.0f} s",
            _all(every, "s"),
        ),
        ("one dispatcher with 2,000 calls", f"{peak} MiB, {used_ms:.2f} CPU ms a call", ""),
    ]


def _mean_running(on: Rig, data: bytes) -> float:
    """Mean share of the slots in use between the first tenth and the last fifth of the records."""
    batch = on.create("org_a", data)
    seen: list[int] = []
    while True:
        done = on.batch("org_a", batch)["request_counts"]["completed"]
        if 200 <= done <= 1_600:
            seen.append(on.simulator.stats()["running"])
        if done > 1_600:
            break
        time.sleep(0.05)
    on.wait("org_a", batch)
    return 100 * sum(seen) / len(seen) / 200


def _others_meanwhile(on: Rig, rounds: int, action: Callable[[], None]) -> tuple[float, float]:
    """Median and worst latency in ms of a list request while `action` runs, `rounds` times.

    It runs in a process of its own, so that only the API can be what makes a request wait.
    """
    found = []
    for _ in range(rounds):
        worker = multiprocessing.get_context("fork").Process(target=action)
        worker.start()
        while worker.is_alive():
            found.append(timed(lambda: on.clients["org_b"].get("/batches").raise_for_status()) * 1000)
        worker.join()
        assert worker.exitcode == 0
    return statistics.median(found), max(found)


def _run(on: Rig, data: bytes) -> float:
    return timed(lambda: on.wait("org_a", on.create("org_a", data)))


def _all(figures: list[float], unit: str) -> str:
    return ", ".join(f"{figure:.1f}" for figure in figures) + f" {unit}"
