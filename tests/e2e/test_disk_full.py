"""The disk under the broker is full, and then it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.patient import KEY, Client, records, settings
from tests.support.disk import mounted
from tests.support.simulator import Simulator
from tests.support.stack import Stack
from tests.support.until import until

SIZE_MB = 160
RECORDS = 2_000
ANSWER_S = 30.0

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own where the stack's broker keeps its data."""
    with mounted(tmp_path / "stack" / "data" / "kafka", SIZE_MB) as place:
        yield place


def fill(place: Path) -> Path:
    """A file that takes all the space that is left."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(os.urandom(size))
            except OSError:
                continue
    return ballast


def test_the_disk_under_the_broker_is_full(tmp_path: Path, small_disk: Path, simulator: Simulator) -> None:
    """Creates answer 503 in bounded time, the operator is told why, and then all that was taken runs."""
    with (
        Stack(tmp_path / "stack", settings(simulator)) as stack,
        Client(stack) as client,
        httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False) as http,
    ):
        accepted = {"a": client.create(records("a", RECORDS))["id"]}
        tried = 0

        def create() -> int:
            """The status of one more create; 0 while the API is being started again."""
            nonlocal tried
            tried += 1
            label = f"d{tried}-"
            body = {
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "requests": records(label, 20),
            }
            began = time.monotonic()
            try:
                answer = http.post(f"{stack.connection['base_url']}/batches", json=body)
            except (httpx.TransportError, OSError):
                return 0
            assert time.monotonic() - began < ANSWER_S
            if answer.status_code == 200:
                accepted[label] = answer.json()["id"]
            else:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "unavailable"
                assert 0 < int(answer.headers["retry-after"]) <= 60
            return answer.status_code

        ballast = fill(small_disk)

        def stopped() -> bool:
            create()
            fill(small_disk)
            return "the disk is full" in stack.said

        until(stopped, 90, lambda: f"the operator is not told\n{stack.tails()}")
        refused = 0
        while refused < 5:
            status = create()
            assert status in (0, 503)
            refused += status == 503
        ballast.unlink()
        until(lambda: create() == 200, 90, lambda: f"nothing is taken after there is space\n{stack.tails()}")
        for label, batch in accepted.items():
            client.polls.clear()
            ended = client.wait(batch)
            assert ended["status"] == "completed"
            client.check(ended, [f"{label}{i}" for i in range(RECORDS if label == "a" else 20)])
        print(f"{tried} creates, {len(accepted)} accepted")
