"""A role and the broker with a network between them that fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from schemas import topics
from schemas.ids import BatchId
from schemas.records import Closed, Result
from schemas.settings import Pool
from services.embedded.ports import free_port
from streams.core.lanes import RESERVE
from streams.kafka.admin import Admin
from streams.kafka.reader import PositionReader
from tests.stages.conftest import LIMITS
from tests.support.broker import EmbeddedBroker
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import Pipeline, record
from tests.support.proxy import Proxy
from tests.support.settings import MODEL, settings_for
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

RECORDS = 4_000
SLOTS = 40
PARTITIONS = 4
CUT_S = 15.0
"""The session is 6 s, a client's request fails after at most 60."""

SWALLOWED_S = 3.0

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def far_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedBroker, Proxy]]:
    """A broker, and the proxy behind which some of its clients are."""
    listener = free_port()
    with Proxy(listener) as proxy:
        broker = EmbeddedBroker(tmp_path_factory.mktemp("far"), listener, proxy.port)
        broker.start()
        try:
            yield broker, proxy
        finally:
            broker.stop()


@pytest.fixture
def stages(
    tmp_path: Path,
    far_broker: tuple[EmbeddedBroker, Proxy],
    tables: EmbeddedWarehouse,
    simulator: Simulator,
) -> Iterator[Pipeline]:
    settings = settings_for(
        tmp_path,
        bootstrap=far_broker[0].bootstrap,
        warehouse_url=tables.url,
        limits=LIMITS,
        partitions=PARTITIONS,
    )
    pools = (Pool(base_url=simulator.url, max_concurrency=SLOTS),)
    model = msgspec.structs.replace(settings.models[MODEL], pools=pools)
    made = Pipeline(tmp_path, msgspec.structs.replace(settings, models={MODEL: model}))
    simulator.control(latency_ms=100, reset=True)
    try:
        yield made
    finally:
        made.close()


def check_result_and_bill(stages: Pipeline, batch: BatchId, tables: EmbeddedWarehouse) -> None:
    state = stages.state(batch)
    check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
    client = tables.client()
    until(
        lambda: (
            stages.revived()
            and client.query(f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'").first_row[0]
            >= RECORDS
        ),
        60,
        lambda: f"rows are missing\n{stages.tail('meter')}",
    )
    check_ledger(client, state)
    client.close()


@pytest.mark.parametrize("how", ["silence", "refuse", "sleep"])
@pytest.mark.parametrize("others", [(), ("dispatch-2",)], ids=["alone", "with-another"])
def test_cut_off_for_longer_than_its_session(
    stages: Pipeline,
    far_broker: tuple[EmbeddedBroker, Proxy],
    simulator: Simulator,
    tables: EmbeddedWarehouse,
    how: str,
    others: tuple[str, ...],
) -> None:
    """It goes on when it is back, or ends and is started again; only what had no result runs twice.

    A process that sleeps is cut off too, and does not even know.
    """
    _, proxy = far_broker
    far = {"OPENRELAY_KAFKA__BOOTSTRAP": f"127.0.0.1:{proxy.port}"}
    stages.start("intake", "settle", "sink", "meter", *others)
    stages.start("dispatch", **far)
    batch = stages.create(record(f"r{i}", f"usage:{i % 9}/{i % 5} cut {i}") for i in range(RECORDS))
    until(lambda: simulator.calls()["count"] > 400, 60, lambda: stages.explain(batch))
    if how == "sleep":
        stages.signal("dispatch", signal.SIGSTOP)
    else:
        getattr(proxy, how)()
    ends = time.monotonic() + CUT_S
    if others:
        # Once the session is over, the other one has everything.
        seen = simulator.calls()["count"]
        until(
            lambda: stages.revived(**far) and simulator.calls()["count"] > seen + 10 * SLOTS,
            30,
            lambda: f"the other dispatcher does not go on\n{stages.explain(batch)}",
        )
    time.sleep(max(0.0, ends - time.monotonic()))  # the fault's length
    proxy.heal()
    stages.signal("dispatch", signal.SIGCONT)
    seen = simulator.calls()["count"]
    until(
        lambda: stages.revived(**far) and simulator.calls()["count"] >= min(seen + 1, RECORDS),
        30,
        lambda: f"nothing is called after the cut\n{stages.explain(batch)}",
    )
    until(
        lambda: stages.revived(**far) and stages.state(batch).ended is not None,
        120,
        lambda: stages.explain(batch),
    )
    check_result_and_bill(stages, batch, tables)
    # What it could start before it noticed had been reserved before the cut.
    repeated = simulator.calls()["count"] - RECORDS
    assert repeated <= SLOTS + PARTITIONS * (RESERVE + RESERVE // 2), repeated
    print(f"{repeated} calls repeated")


@pytest.mark.parametrize("how", ["silence", "refuse"])
@pytest.mark.parametrize("role", ["settle", "sink", "meter"])
def test_another_role_is_cut_off_for_longer_than_its_session(
    stages: Pipeline,
    far_broker: tuple[EmbeddedBroker, Proxy],
    simulator: Simulator,
    tables: EmbeddedWarehouse,
    role: str,
    how: str,
) -> None:
    _, proxy = far_broker
    far = {"OPENRELAY_KAFKA__BOOTSTRAP": f"127.0.0.1:{proxy.port}"}
    stages.start("intake", "dispatch", *({"settle", "sink", "meter"} - {role}))
    stages.start(role, **far)
    batch = stages.create(record(f"r{i}", f"usage:{i % 9}/{i % 5} cut {role} {i}") for i in range(RECORDS))
    until(lambda: simulator.calls()["count"] > 400, 60, lambda: stages.explain(batch))
    getattr(proxy, how)()
    time.sleep(CUT_S)  # the fault's length
    proxy.heal()
    until(
        lambda: stages.revived(**far) and stages.state(batch).ended is not None,
        90,
        lambda: stages.explain(batch),
    )
    check_result_and_bill(stages, batch, tables)
    assert simulator.calls()["count"] == RECORDS


def test_acknowledgements_are_swallowed(
    stages: Pipeline, far_broker: tuple[EmbeddedBroker, Proxy], simulator: Simulator
) -> None:
    """What is sent arrives and its acknowledgement does not, five times: nothing is in the log twice."""
    _, proxy = far_broker
    stages.start("intake", "settle", "sink")
    stages.start("dispatch", OPENRELAY_KAFKA__BOOTSTRAP=f"127.0.0.1:{proxy.port}")
    batch = stages.create(record(f"r{i}", f"ok swallowed {i}") for i in range(RECORDS))
    for _ in range(5):
        seen = simulator.calls()["count"]
        until(
            lambda seen=seen: simulator.calls()["count"] > min(seen + 200, RECORDS - 1),  # type: ignore[misc]
            60,
            lambda: f"no calls\n{stages.explain(batch)}",
        )
        proxy.swallow()
        time.sleep(SWALLOWED_S)  # the fault's length
        proxy.heal()
    state = stages.wait_ended(batch)
    check_batch(state, [f"r{i}" for i in range(RECORDS)], stages.lines(batch, "output"), [])
    assert simulator.calls()["count"] == RECORDS
    place = (topics.RESULTS, topics.partition_of(batch, PARTITIONS))
    admin = Admin(stages.settings.kafka, "test-results")
    reader = PositionReader(stages.settings.kafka, "test-results", 1)
    found = reader.read_to_end(*place, 0, admin.end_offsets([place])[place], 60)
    reader.close()
    results = [msgspec.json.decode(each.value or b"", type=Result) for each in found]
    indexes = [r.index for r in results if not isinstance(r, Closed) and r.batch == batch]
    assert sorted(indexes) == list(range(RECORDS))
