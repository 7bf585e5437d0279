"""Asking for a group's offsets while the broker dies again and again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broker import EmbeddedBroker
from tests.support.command import environment
from tests.support.until import until

KILLS = 3

# A process of its own, since what is feared is that the client library aborts it.
ASKING = """
import sys
from schemas.settings import Kafka
from streams.kafka.admin import Admin
from streams.kafka.messages import KafkaFailed

admin = Admin(Kafka(bootstrap=sys.argv[1]), "asking")
while True:
    try:
        admin.committed("nobody", [("anything", 0)])
    except KafkaFailed:
        print("failed", flush=True)
    else:
        print("answered", flush=True)
"""


@pytest.mark.faults
def test_no_death_of_the_broker_ends_the_process_that_asks(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "kafka")
    broker.start()
    said = tmp_path / "said"
    with said.open("w") as output:
        asking = subprocess.Popen(
            [sys.executable, "-c", ASKING, broker.bootstrap], env=environment(), stdout=output, stderr=output
        )
    try:

        def answers() -> int:
            assert asking.poll() is None, said.read_text("utf-8")[-2_000:]
            return said.read_text("utf-8").count("answered")

        for _ in range(KILLS):
            before = answers()
            until(lambda before=before: answers() > before + 100, 60, "no answers")  # type: ignore[misc]
            broker.kill()
            broker.start()
        before = answers()
        until(lambda: answers() > before, 60, "no answers after the last kill")
    finally:
        asking.kill()
        asking.wait()
        broker.stop()
