"""Everything dies at once, again and again, at instants nobody chose."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.patient import Client, records, settings
from tests.support.simulator import Simulator
from tests.support.stack import Stack

CUTS = 3
RECORDS = 1_200

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [1, 2])
def test_batches_survive_power_cuts_at_any_instant(tmp_path: Path, simulator: Simulator, seed: int) -> None:
    """Each life of the stack creates a batch, works for a moment of random length and is cut off."""
    print(f"seed {seed}")
    instants = random.Random(seed)
    stack = Stack(tmp_path / "stack", settings(simulator))
    with stack:
        created = [_create(stack, 0)]
        for life in range(1, CUTS + 1):
            time.sleep(instants.uniform(0, 4))  # the fault's instant, not a wait
            stack.kill_all()
            stack.start()
            created.append(_create(stack, life))
        for life, batch in enumerate(created):
            with _connected(stack) as client:
                ended = client.wait(batch, timeout_s=300)
                assert ended["status"] == "completed"
                client.check(ended, [f"life{life}-{number}" for number in range(RECORDS)])


@contextmanager
def _connected(stack: Stack) -> Iterator[Client]:
    client = Client(stack)
    try:
        yield client
    finally:
        client._http.close()


def _create(stack: Stack, life: int) -> str:
    with _connected(stack) as client:
        return str(client.create(records(f"life{life}-", RECORDS))["id"])
