"""An operator kills any process at any instant, and shrugs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.patient import Client, records, settings
from tests.support.simulator import Simulator
from tests.support.stack import Stack
from tests.support.until import until

ACKNOWLEDGED_S = 2.0
"""An answer is in the log this much later at the most; until then its call counts as in flight."""


def test_every_process_killed_once_under_one_batch(tmp_path: Path, simulator: Simulator) -> None:
    """2,000 records at 20 ms; each role and the broker gets SIGKILL while it works."""
    with Stack(tmp_path / "stack", settings(simulator)) as stack, Client(stack) as client:
        began = time.time()
        batch = client.create(records("k", 2000))
        kills = []
        for role in ("api", "dispatch", "settle", "sink", "meter", "warehouse", "kafka"):
            before = simulator.calls()["count"]
            stack.kill(role)
            kills.append(time.time())
            until(
                lambda before=before: simulator.calls()["count"] >= min(2000, before + 100),  # type: ignore[misc]
                60,
                lambda role=role: f"no calls after {role} was killed\n{stack.tails()}",  # type: ignore[misc]
            )
        ended = client.wait(batch["id"])
        assert ended["status"] == "completed"
        client.check(ended, [f"k{i}" for i in range(2000)])
        count = simulator.calls()["count"]
        calls = until(
            lambda: len(found := simulator.logged(began)) == count and found, 10, "calls not logged"
        )
        by_record: dict[str, list[dict[str, Any]]] = {}
        for call in sorted(calls, key=lambda call: call["t_arrived"]):
            by_record.setdefault(call["prompt"], []).append(call)
        assert len(by_record) == 2000
        for first, *again in by_record.values():
            for call in again:
                assert any(first["t_arrived"] <= at <= first["t_end"] + ACKNOWLEDGED_S for at in kills), (
                    f"{call} repeats {first}, which was not in flight at any of the kills {kills}"
                )
                first = call


@pytest.mark.faults
def test_stopped_past_their_session_and_continued(tmp_path: Path, simulator: Simulator) -> None:
    """settle, sink and intake (api) sleep until their partitions are given away, then wake up."""
    simulator.control(latency_ms=100)
    with Stack(tmp_path / "stack", settings(simulator)) as stack, Client(stack) as client:
        first = client.create(records("a", 1000))
        for role in ("settle", "sink", "api"):
            stack.stop(role)
        time.sleep(8)  # their session is 6 s: this is the fault, not a wait
        for role in ("settle", "sink", "api"):
            stack.cont(role)
        second = client.create(records("b", 300))
        for batch, label, count in ((first, "a", 1000), (second, "b", 300)):
            client.polls.clear()
            ended = client.wait(batch["id"])
            assert ended["status"] == "completed"
            client.check(ended, [f"{label}{i}" for i in range(count)])


@pytest.mark.faults
def test_everything_killed_right_after_the_answer(tmp_path: Path, simulator: Simulator) -> None:
    """A 200 to create means the batch is kept, even if that was the last thing anybody said."""
    with Stack(tmp_path / "stack", settings(simulator)) as stack, Client(stack) as client:
        batch = client.create(records("p", 300))
        stack.kill_all()
        stack.start()
        ended = client.wait(batch["id"])
        assert ended["status"] == "completed"
        client.check(ended, [f"p{i}" for i in range(300)])
