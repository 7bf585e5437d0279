"""A process dies between two numbered steps of its stage; started again, it leaves no trace in the result."""

from __future__ import annotations

import signal
import subprocess
import time

import msgspec
import pytest

from schemas.batches import Status
from schemas.settings import Limits
from streams.core.lifecycle import terminal_status
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import Pipeline, record
from tests.support.simulator import Simulator
from tests.support.until import SLACK_S, until
from tests.support.warehouse import EmbeddedWarehouse

RECORDS = 300
ROLES = ("dispatch", "settle", "sink", "meter")
POINTS = [
    "dispatch.calling:40",
    "dispatch.called:40",
    "dispatch.acknowledged:40",
    "settle.effects:1",
    "settle.settled:1",
    "settle.ledger:1",
    "settle.committed:1",
    "sink.segment:1",
    "sink.files:1",
    "sink.ended:1",
    "meter.inserted:1",
]


def wait_for_end(stages: Pipeline, role: str) -> None:
    """Until the role has died as by SIGKILL."""
    child: subprocess.Popen[bytes] = stages.children[role]
    until(
        lambda: child.poll() is not None, 60, lambda: f"{role} did not pass its point:\n{stages.tail(role)}"
    )
    assert child.returncode == -signal.SIGKILL, stages.tail(role)
    del stages.children[role]


@pytest.mark.faults
@pytest.mark.parametrize("point", POINTS)
def test_death_between_two_steps(
    pipeline: MakePipeline, simulator: Simulator, tables: EmbeddedWarehouse, point: str
) -> None:
    stages = pipeline()
    simulator.control(latency_ms=2)
    before = simulator.calls()["count"]
    role = point.partition(".")[0]
    stages.start("intake", *(other for other in ROLES if other != role))
    stages.start(role, OPENRELAY_CRASH_AT=point)
    batch = stages.create(record(f"r{i}", f"usage:{i % 9}/{i % 5} crash {point}") for i in range(RECORDS))
    wait_for_end(stages, role)
    stages.start(role)
    state = stages.wait_ended(batch)
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(RECORDS)], output, error)
    assert not error
    client = tables.client()
    until(
        lambda: (
            client.query(f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'").first_row[0]
            >= RECORDS
        ),
        60,
        lambda: f"rows are missing\n{stages.tail('meter')}",
    )
    check_ledger(client, state)
    assert not client.query("SELECT * FROM billing.conflicting_duplicates").result_rows
    client.close()
    repeated = simulator.calls()["count"] - before - RECORDS
    if role == "dispatch":
        assert repeated <= stages.settings.models["openrelay/test"].pools[0].max_concurrency
    else:
        assert repeated == 0


def test_a_record_that_kills_its_dispatcher_three_times_is_given_up(pipeline: MakePipeline) -> None:
    """Its neighbours finish, and nobody else is given up."""
    stages = pipeline()
    stages.start("intake", "settle", "sink")
    names = [f"r{i}" for i in range(200)]
    names[77] = "poison"
    batch = stages.create(record(name, "ok") for name in names)
    for _ in range(3):
        stages.start("dispatch", OPENRELAY_CRASH_AT="dispatch.calling@poison")
        wait_for_end(stages, "dispatch")
    stages.start("dispatch", OPENRELAY_CRASH_AT="dispatch.calling@poison")
    state = stages.wait_ended(batch)
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(state, names, output, error)
    assert [(line["custom_id"], line["error"]["code"]) for line in error] == [("poison", "processing_failed")]
    assert terminal_status(state) is Status.COMPLETED


def test_a_rolling_restart_repeats_no_call(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline()
    simulator.control(latency_ms=200)
    before = simulator.calls()["count"]
    stages.start("intake", "dispatch", "dispatch-2", "settle", "sink")
    batch = stages.create(record(f"r{i}", f"ok rolling {i}") for i in range(2_000))
    for name in ("dispatch", "dispatch-2"):
        seen = simulator.calls()["count"]
        until(lambda seen=seen: simulator.calls()["count"] > seen + 150, 60, "no calls")  # type: ignore[misc]
        assert stages.stop(name) == 0
        stages.start(name)
    state = stages.wait_ended(batch)
    check_batch(state, [f"r{i}" for i in range(2_000)], stages.lines(batch, "output"), [])
    assert simulator.calls()["count"] - before == 2_000


def test_slots_of_all_dispatchers_stay_within_the_endpoints_limit(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    stages = pipeline(slots=30)
    # So slow that the first still runs when the second has come, though it may have half of the slots from
    # the start: one that was there before them keeps its share until its session ends.
    simulator.control(latency_ms=100, reset=True)
    stages.start("intake", "dispatch", "settle", "sink")
    batch = stages.create(record(f"r{i}", f"ok slots {i}") for i in range(2_400))
    stages.start("dispatch-2")
    stages.wait_ended(batch)
    assert 20 <= simulator.stats()["peak_open"] <= 30


def test_a_server_that_dies_under_its_calls_loses_them_to_another(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Simulator(tmp_path_factory.mktemp("dying"), "--latency-ms", "60000") as dying:
        stages = pipeline(LIMITS, more_pools=[dying.url])
        stages.start("intake", "dispatch", "settle", "sink")
        batch = stages.create(record(f"r{i}", f"ok dying {i}") for i in range(60))
        until(lambda: dying.stats()["running"] > 10, 30, "the other server got no calls")
        dying.kill()
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(60)], stages.lines(batch, "output"), [])


def test_sick_health_takes_the_calls_away(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It still holds its connections, but says that it is not healthy."""
    with Simulator(tmp_path_factory.mktemp("sick"), "--latency-ms", "600000") as sick:
        stages = pipeline(LIMITS, more_pools=[sick.url])
        stages.start("intake", "dispatch", "settle", "sink")
        batch = stages.create(record(f"r{i}", f"ok sick {i}") for i in range(60))
        until(lambda: sick.stats()["running"] > 10, 30, "the other server got no calls")
        sick.control(healthy=False)
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(60)], stages.lines(batch, "output"), [])


@pytest.mark.faults
def test_a_server_that_stays_sick_is_left_alone_until_it_is_well(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Calls that tried it would hang until their time is over, and their records fail."""
    with Simulator(tmp_path_factory.mktemp("stays-sick"), "--latency-ms", "600000") as sick:
        limits = msgspec.structs.replace(LIMITS, request_time_limit_s=20.0)
        stages = pipeline(limits, slots=4, more_pools=[sick.url])
        simulator.control(latency_ms=200)
        stages.start("intake", "dispatch", "settle", "sink")
        ids = [f"r{i}" for i in range(500)]
        batch = stages.create(record(name, f"ok stays sick {name}") for name in ids)
        until(lambda: sick.stats()["running"] > 0, 30, "the other server got no calls")
        sick.control(healthy=False)
        until(lambda: sick.stats()["running"] == 0, 30, "it keeps its calls")
        sick.control(reset=True, latency_ms=0)
        state = stages.wait_ended(batch)
        check_batch(state, ids, stages.lines(batch, "output"), [])
        assert sick.calls()["count"] == 0
        sick.control(healthy=True)
        until(lambda: "endpoint well again" in stages.tail("dispatch"), 30, "nobody asks whether it is well")
        batch = stages.create(record(name, f"ok well {name}") for name in ids)
        stages.wait_ended(batch)
        assert sick.calls()["count"] > 0


def test_sick_health_takes_the_calls_away_from_a_server_that_has_left_the_settings(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An operator takes a server out because it does not answer."""
    with Simulator(tmp_path_factory.mktemp("left"), "--latency-ms", "600000") as sick:
        stages = pipeline(LIMITS, more_pools=[sick.url])
        stages.start("intake", "dispatch", "settle", "sink")
        batch = stages.create(record(f"r{i}", f"ok left {i}") for i in range(60))
        until(lambda: sick.stats()["running"] > 10, 30, "the other server got no calls")
        stages.reconfigure(pipeline(LIMITS).settings)
        until(lambda: "settings read again" in stages.tail("dispatch"), 30, "the settings were not read")
        sick.control(healthy=False)
        state = stages.wait_ended(batch, 60)
        check_batch(state, [f"r{i}" for i in range(60)], stages.lines(batch, "output"), [])


def test_a_pool_that_cannot_be_reached_keeps_records_waiting(
    pipeline: MakePipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    late = Simulator(tmp_path_factory.mktemp("late"))
    stages = pipeline(Limits(max_attempts=2, retry_backoff_s=0.05), pool_url=late.url)
    stages.start("intake", "dispatch", "settle", "sink")
    batch = stages.create(record(f"r{i}", f"ok late {i}") for i in range(50))
    until(lambda: "endpoint out" in stages.tail("dispatch"), 30, lambda: stages.tail("dispatch"))
    with late:
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(50)], stages.lines(batch, "output"), [])


def test_a_server_that_tells_its_queue_is_not_drowned(
    pipeline: MakePipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It runs 10 calls at once; of the 200 allowed, no more than a short queue stays there."""
    with Simulator(tmp_path_factory.mktemp("small"), "--latency-ms", "100", "--concurrency", "10") as small:
        stages = pipeline(slots=200, pool_url=small.url)
        stages.start("intake", "dispatch", "settle", "sink")
        batch = stages.create(record(f"r{i}", f"ok small {i}") for i in range(900))
        until(lambda: small.stats()["running"] + small.stats()["waiting"] > 150, 30, "it was never drowned")
        until(lambda: 0 < small.stats()["waiting"] <= 5, 30, "its queue never got short")
        small.control(reset=True)
        stages.wait_ended(batch)
        assert small.stats()["peak_open"] <= 40


def test_endpoints_come_and_go_with_the_settings_while_calls_run(
    pipeline: MakePipeline, simulator: Simulator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Simulator(tmp_path_factory.mktemp("other"), "--latency-ms", "50") as other:
        stages = pipeline(slots=20)
        simulator.control(latency_ms=50, reset=True)
        stages.start("intake", "dispatch", "settle", "sink")
        batch = stages.create(record(f"r{i}", f"ok settings {i}") for i in range(2_500))
        until(lambda: simulator.calls()["count"] > 50, 30, "no calls")
        stages.reconfigure(pipeline(slots=20, pool_url=other.url).settings)
        until(lambda: other.calls()["count"] > 200, 30, "the new endpoint got no calls")
        until(lambda: simulator.stats()["running"] == 0, 30, "the old endpoint still gets calls")
        state = stages.wait_ended(batch)
        check_batch(state, [f"r{i}" for i in range(2_500)], stages.lines(batch, "output"), [])
        assert simulator.calls()["count"] + other.calls()["count"] == 2_500


def test_a_crash_repeats_only_what_was_running_even_far_behind(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    """5,000 records are finished beyond one that is slow."""
    stages = pipeline()
    simulator.control(latency_ms=0)
    stages.start("intake", "dispatch", "settle", "sink")
    names = [f"r{i}" for i in range(5_001)]
    before = simulator.calls()["count"]
    batch = stages.create(record(name, "slow:8 far" if name == "r0" else f"ok far {name}") for name in names)
    until(lambda: simulator.calls()["count"] - before == 5_001, 60, "not all were called")
    until(lambda: simulator.stats()["running"] == 1, 30, "more than the slow one is running")
    stages.kill("dispatch")
    stages.start("dispatch")
    state = stages.wait_ended(batch)
    check_batch(state, names, stages.lines(batch, "output"), [])
    assert simulator.calls()["count"] - before <= 5_001 + 1 + 256
    assert simulator.calls()["prompts"]["slow:8 far"] == 2


@pytest.mark.faults
def test_a_storm_of_rebalances(pipeline: MakePipeline, simulator: Simulator) -> None:
    """Dispatchers come and go every two seconds, and progress goes on."""
    stages = pipeline(slots=50)
    simulator.control(latency_ms=100)
    stages.start("intake", "dispatch", "settle", "sink")
    before = simulator.calls()["count"]
    batch = stages.create(record(f"r{i}", f"ok storm {i}") for i in range(8_000))
    ends = time.monotonic() + 30
    present = {"dispatch"}
    while time.monotonic() < ends and stages.state(batch).settled is None:
        seen = simulator.calls()["count"]
        for name in ("dispatch-2", "dispatch-3"):
            if name in present:
                stages.kill(name) if name == "dispatch-2" else stages.stop(name)
                present.discard(name)
            else:
                stages.start(name)
                present.add(name)
        until(lambda seen=seen: simulator.calls()["count"] > seen, 10 + SLACK_S, "progress has stopped")  # type: ignore[misc]
        time.sleep(1)  # the pace of the storm
    state = stages.wait_ended(batch)
    check_batch(state, [f"r{i}" for i in range(8_000)], stages.lines(batch, "output"), [])
    assert simulator.calls()["count"] - before - 8_000 <= 50 * 20
