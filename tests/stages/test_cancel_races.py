"""Cancels at any instant: while a batch is laid out, runs, ends, expires; once or twice, and at once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from schemas.batches import Status
from schemas.ids import BatchId
from streams.core.lifecycle import terminal_status
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import record
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

BATCHES = 60
RECORDS = 60
WINDOW_S = 2.0
"""Of every third batch: it expires about when it is cancelled."""

BOUND_S = 1.0
"""After a cancel is in the log, nothing new starts once every dispatcher has read it: one poll."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    directory = tmp_path_factory.mktemp("races")
    running = Simulator(directory, "--latency-ms", "60", "--concurrency", "1000")
    running.options = (*running.options, "--call-log", str(running.log))
    with running:
        yield running


@pytest.mark.parametrize("seed", [1, 2])
def test_cancels_race_with_everything(
    pipeline: MakePipeline, model: Simulator, tables: EmbeddedWarehouse, seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    stages = pipeline(LIMITS, pool_url=model.url, slots=30)
    stages.start("intake", "dispatch", "dispatch-2", "settle", "settle-2", "sink", "meter")
    batches: dict[BatchId, str] = {}
    due: list[tuple[float, BatchId]] = []
    cancelled_at: dict[BatchId, float] = {}
    began = time.monotonic()
    for number in range(BATCHES):
        label = f"race{seed}-{number}"
        batch = stages.create(
            (record(f"r{i}", f"usage:{i % 9}/{i % 5} {label} {i}") for i in range(RECORDS)),
            window_s=WINDOW_S if number % 3 == 0 else 3600.0,
        )
        batches[batch] = label
        at = time.monotonic() + chance.uniform(0, 5)
        due += [(at, batch)] * chance.choice((1, 1, 2))
        if chance.random() < 0.3:
            due.append((at + chance.uniform(0, 1), batch))
    for at, batch in sorted(due):
        time.sleep(max(0.0, at - time.monotonic()))  # the fault's instant
        stages.cancel(batch)
        cancelled_at.setdefault(batch, time.time())
    print(f"{len(due)} cancels within {time.monotonic() - began:.1f} s")
    ends = dict.fromkeys(Status, 0)
    client = tables.client()
    for batch in batches:
        state = stages.wait_ended(batch)
        output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
        check_batch(state, [f"r{i}" for i in range(RECORDS)], output, error)
        status = terminal_status(state)
        assert status is not None
        ends[status] += 1
        codes = {line["error"]["code"] for line in error}
        assert codes <= {"batch_cancelled", "batch_expired"}
        assert state.ended is not None
        assert state.ended.status == status.value
        if status is Status.COMPLETED:
            assert not error
        count = len(output)
        until(
            lambda batch=batch, count=count: (  # type: ignore[misc]
                client.query(f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'").first_row[0]
                >= count
            ),
            60,
            lambda: f"rows are missing\n{stages.tail('meter')}",
        )
        check_ledger(client, state)
    client.close()
    print({status.value: count for status, count in ends.items() if count})
    for status in (Status.COMPLETED, Status.EXPIRED, Status.CANCELLED):
        assert ends[status] >= 3, "the race is won by one side only"
    names = {label: batch for batch, label in batches.items()}
    for call in model.logged(0.0):
        batch = names[call["marker"].split()[1]]
        assert call["t_arrived"] <= cancelled_at[batch] + BOUND_S, call
