"""Records that were running at two crashes of their dispatcher run alone, and hardly hold anybody else up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from schemas.ids import BatchId
from schemas.settings import Pool, Settings
from services.operator.audit import audit
from services.operator.telling import lines
from streams.core.stuck import UNSERVED
from streams.kafka.admin import create_topics
from tests.stages.conftest import LIMITS, MakePipeline
from tests.stages.test_crash_points import wait_for_end
from tests.support.check import check_batch
from tests.support.customer import Customer
from tests.support.pipeline import Pipeline, record, with_tools
from tests.support.settings import MODEL
from tests.support.simulator import Simulator
from tests.support.until import until

OTHER = "openrelay/other"
SUSPECTS = 12
FRESH = 40
LONG_MS = 120_000
LIMITS_HERE = msgspec.structs.replace(LIMITS, stuck_after_s=4.0)


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """The server of the model `OTHER`."""
    with Simulator(tmp_path_factory.mktemp("other"), "--concurrency", "1000") as running:
        yield running


def with_other(pipeline: MakePipeline, other: Simulator, slots: int = 64) -> Pipeline:
    """Two models, each with a server of its own."""
    stages = pipeline(LIMITS_HERE)
    model = stages.settings.models[MODEL]
    another = msgspec.structs.replace(model, pools=(Pool(base_url=other.url, max_concurrency=slots),))
    stages.settings = msgspec.structs.replace(stages.settings, models={MODEL: model, OTHER: another})
    create_topics(stages.settings)
    stages.reconfigure(stages.settings)
    return stages


def without_other(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, models={MODEL: settings.models[MODEL]})


def suspects(stages: Pipeline, other: Simulator, prompt: str = "ok") -> BatchId:
    """A batch of the other model that was running at two crashes; no dispatcher runs."""
    stages.start("dispatch")
    batch = stages.create(
        (record(f"a{i}", f"{prompt} suspect {i}", OTHER) for i in range(SUSPECTS)),
        organization="org_a",
        model=OTHER,
    )
    for crash in (1, 2):
        until(
            lambda crash=crash: other.calls()["count"] >= crash * SUSPECTS,  # type: ignore[misc]
            60,
            lambda: stages.explain(batch),
        )
        stages.kill("dispatch")
        if crash == 1:
            stages.start("dispatch")
    return batch


def fresh(stages: Pipeline) -> BatchId:
    return stages.create(
        (record(f"b{i}", f"ok fresh {i}") for i in range(FRESH)), organization="org_b", model=MODEL
    )


def check_fresh(stages: Pipeline, batch: BatchId, timeout_s: float = 60) -> None:
    """Long before a call of the suspects ends, or their server is well again."""
    state = stages.wait_ended(batch, timeout_s)
    check_batch(state, [f"b{i}" for i in range(FRESH)], stages.lines(batch, "output"), [])


def check_suspects(stages: Pipeline, batch: BatchId) -> None:
    """They finish, each once."""
    state = stages.wait_ended(batch)
    check_batch(state, [f"a{i}" for i in range(SUSPECTS)], stages.lines(batch, "output"), [])


@pytest.mark.faults
def test_others_finish_beside_suspects_whose_calls_are_long(
    pipeline: MakePipeline, simulator: Simulator, other: Simulator
) -> None:
    stages = with_other(pipeline, other)
    simulator.control(latency_ms=50)
    other.control(latency_ms=LONG_MS)
    stages.start("intake", "settle", "sink")
    batch = suspects(stages, other)
    until(lambda: other.stats()["running"] == 0, 30, "calls of the dead dispatcher run")
    stages.start("dispatch")
    until(lambda: other.stats()["running"] == 1, 30, lambda: stages.explain(batch))
    check_fresh(stages, fresh(stages))
    assert stages.state(batch).settled is None
    other.control(latency_ms=0)
    other.kill()
    other.start()
    check_suspects(stages, batch)


@pytest.mark.faults
def test_suspects_whose_server_is_away_hold_nobody_up(
    pipeline: MakePipeline, simulator: Simulator, other: Simulator
) -> None:
    """`openrelay audit` says why they wait; when the server is there again they finish."""
    stages = with_other(pipeline, other)
    other.control(latency_ms=LONG_MS)
    stages.start("intake", "settle", "sink")
    batch = suspects(stages, other)
    other.kill()
    stages.start("dispatch")
    check_fresh(stages, fresh(stages))

    def told() -> str:
        return "\n".join(lines(audit(stages.settings, batch)))

    until(lambda: "they run one at a time" in told(), 60, told)
    assert stages.state(batch).settled is None
    other.start()
    check_suspects(stages, batch)


@pytest.mark.faults
def test_suspects_whose_server_says_retry_after_hold_nobody_up(
    pipeline: MakePipeline, simulator: Simulator, other: Simulator
) -> None:
    stages = with_other(pipeline, other)
    stages.start("intake", "settle", "sink")
    batch = suspects(stages, other, "retry-after:3600:1000")
    stages.start("dispatch")
    seen = other.calls()["count"]
    check_fresh(stages, fresh(stages))
    print(other.calls()["count"] - seen, "calls of suspects meanwhile")
    assert stages.state(batch).settled is None
    stages.cancel(batch)
    stages.wait_ended(batch)


@pytest.mark.faults
def test_suspects_of_a_model_that_is_not_in_the_settings_wait(
    pipeline: MakePipeline, simulator: Simulator, other: Simulator
) -> None:
    """They hold nobody up, none is given up however often the dispatcher is killed, and they finish."""
    stages = with_other(pipeline, other)
    other.control(latency_ms=LONG_MS)
    stages.start("intake", "settle", "sink")
    batch = suspects(stages, other)
    known = stages.settings
    stages.reconfigure(without_other(known))
    for _ in range(2):
        stages.start("dispatch")
        check_fresh(stages, fresh(stages))
        until(lambda: UNSERVED in stages.tail("dispatch"), 30, lambda: stages.tail("dispatch"))
        assert stages.children["dispatch"].poll() is None, stages.tail("dispatch")
        stages.kill("dispatch")
    stages.start("dispatch")
    other.control(latency_ms=0)
    stages.reconfigure(known)
    check_suspects(stages, batch)


def crashes_until_the_end(
    stages: Pipeline,
    batch: BatchId,
    at: str,
    within_s: float,
    started: Callable[[], object] = lambda: None,
) -> int:
    """How often the dispatcher dies `at` a point, at most three times, until the batch ends."""
    crashes = 0
    while stages.state(batch).ended is None:
        stages.start("dispatch", OPENRELAY_CRASH_AT=at)
        child = stages.children["dispatch"]
        started()
        until(
            lambda child=child: child.poll() is not None or stages.state(batch).ended is not None,  # type: ignore[misc]
            within_s,
            lambda: stages.explain(batch),
        )
        if child.poll() is not None:
            wait_for_end(stages, "dispatch")
            crashes += 1
            assert crashes <= 3
    return crashes


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("whose", ["model", "tool"])
def test_a_record_whose_late_answer_kills_its_dispatcher_is_given_up(
    pipeline: MakePipeline, simulator: Simulator, other: Simulator, customer: Customer, whose: str
) -> None:
    """Others do not wait for its answer; it is named again when that comes, and nobody else is given up."""
    stages = with_other(pipeline, other)
    simulator.control(latency_ms=50)
    stages.start("intake", "settle", "sink")
    slow = {"model": "slow:12 at last", "tool": "tools:1 ask somebody slow"}[whose]
    crash = {"model": "dispatch.answered@poison", "tool": "dispatch.ran-tools@poison"}[whose]
    names = [f"a{i}" for i in range(SUSPECTS)]
    records = [record(name, "ok", OTHER) for name in names]
    names[5], records[5] = "poison", with_tools("poison", slow, f"{customer.url}/tools/slow/12", model=OTHER)
    if whose == "model":
        records[5] = record("poison", slow, OTHER)
    batch = stages.create(records, organization="org_a", model=OTHER)
    besides = []
    crashes = crashes_until_the_end(stages, batch, crash, 90, lambda: besides.append(fresh(stages)))
    check_fresh(stages, besides[-1])
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(stages.state(batch), names, output, error)
    assert [(line["custom_id"], line["error"]["code"]) for line in error] == [("poison", "processing_failed")]
    assert crashes == 3


@pytest.mark.faults
def test_a_record_that_kills_after_a_clean_stop_is_given_up(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    """Whoever takes over from a dispatcher that was stopped in good order counts as it would have."""
    stages = pipeline(msgspec.structs.replace(LIMITS, drain_s=1.0))
    stages.start("intake", "dispatch", "settle", "sink")
    batch = stages.create([record("poison", "slow:4")])
    until(lambda: stages.state(batch).enqueued is not None, 30, lambda: stages.explain(batch))
    until(lambda: simulator.stats()["running"] == 1, 30, lambda: stages.explain(batch))
    assert stages.stop("dispatch") == 0
    crashes = crashes_until_the_end(stages, batch, "dispatch.answered@poison", 60)
    assert [line["error"]["code"] for line in stages.lines(batch, "error")] == ["processing_failed"]
    assert crashes == 3
