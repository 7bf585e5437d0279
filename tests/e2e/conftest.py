"""A model server of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.simulator import Simulator


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    """Twenty milliseconds a call, which it writes down."""
    running = Simulator(tmp_path, "--latency-ms", "20", "--concurrency", "500")
    running.options += ("--call-log", str(running.log))
    with running:
        yield running
