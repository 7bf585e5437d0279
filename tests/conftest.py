"""What tests of several kinds share: one broker and one warehouse a session, and settings for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.broker import EmbeddedBroker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """An embedded broker for the session. A test that kills it starts it again before it ends."""
    running = EmbeddedBroker(tmp_path_factory.mktemp("kafka"))
    running.start()
    try:
        yield running
    finally:
        running.stop()
