"""What tests of several kinds share: one broker and one warehouse a session, and settings for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.broker import EmbeddedBroker
from tests.support.warehouse import EmbeddedWarehouse

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("long", max_examples=100, stateful_step_count=30, deadline=None)
settings.load_profile("repeatable")  # to search with other examples each time: --hypothesis-profile=long


LONGEST = "test_cut_off.py"
QUICK = {"architecture", "golden", "properties", "unit"}
"""Folders whose files take seconds at the most."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first and quick ones last, so that what runs side by side ends at the same time."""
    here = Path(__file__).parent
    items.sort(key=lambda item: (item.path.name != LONGEST, item.path.relative_to(here).parts[0] in QUICK))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """An embedded broker for the session. A test that kills it starts it again before it ends."""
    running = EmbeddedBroker(tmp_path_factory.mktemp("kafka"))
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWarehouse]:
    """An embedded warehouse for the session, without tables."""
    running = EmbeddedWarehouse(tmp_path_factory.mktemp("warehouse"))
    running.start()
    try:
        yield running
    finally:
        running.stop()
