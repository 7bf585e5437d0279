"""A batch goes through the stages and comes out whole."""

from __future__ import annotations

import msgspec

from schemas.batches import Status
from schemas.facts import Priority
from schemas.settings import Limits
from streams.core.lifecycle import terminal_status
from tests.stages.conftest import LIMITS, MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.pipeline import Pipeline, record
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

ROLES = ("intake", "dispatch", "settle", "sink")


def run(pipeline: Pipeline, prompts: list[str], **options: object) -> tuple[dict[str, dict], dict[str, dict]]:  # type: ignore[type-arg]
    """Run one record a prompt, `r0` and on; output and error lines by custom id, checked."""
    batch = pipeline.create((record(f"r{i}", prompt) for i, prompt in enumerate(prompts)), **options)  # type: ignore[arg-type]
    state = pipeline.wait_ended(batch)
    output, error = pipeline.lines(batch, "output"), pipeline.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(len(prompts))], output, error)
    return {x["custom_id"]: x for x in output}, {x["custom_id"]: x for x in error}


def test_lines_counts_and_bill_agree(pipeline: MakePipeline, tables: EmbeddedWarehouse) -> None:
    stages = pipeline()
    stages.start(*ROLES, "meter")
    batch = stages.create(
        (
            record(f"r{i}", f"usage:{i % 7}/{i % 11}/{i % 3 if i % 7 > 2 else 0} agree {i}")
            for i in range(500)
        ),
        priority=Priority.EXPEDITED,
    )
    state = stages.wait_ended(batch)
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(500)], output, error)
    assert not error
    client = tables.client()
    until(
        lambda: (
            client.query(f"SELECT count() FROM billing.usage WHERE batch_id = '{batch}'").first_row[0] == 500
        ),
        30,
        "the meter did not bring all rows",
    )
    check_ledger(client, state)
    until(
        lambda: (
            client.query(f"SELECT status FROM billing.batches FINAL WHERE batch_id = '{batch}'").result_rows
            == [("completed",)]
        ),
        30,
        "the batch is not in billing.batches",
    )
    assert client.query(f"SELECT * FROM billing.batch_mismatches WHERE batch_id = '{batch}'").row_count == 0
    client.close()


def test_failures_keep_their_status_and_land_in_the_error_file(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    prompts = [
        "ok kept",
        "status:400 kept",
        "status:403 kept",
        "status:500 kept",
        "drop kept",
        "empty kept",
        "half kept",
        "status:422 kept",
        "nochoices kept",
        "usage:null kept",
        "usage:badtotal kept",
    ]
    output, error = run(stages, prompts)
    assert set(output) == {"r0", "r9", "r10"}
    for custom_id, status in (("r1", 400), ("r2", 403), ("r3", 500), ("r7", 422)):
        line = error[custom_id]
        assert line["error"] is None
        assert line["response"]["status_code"] == status
        assert (line["response"]["body"] is None) == (status == 403)
    for custom_id, code in (
        ("r4", "model_unavailable"),
        ("r5", "invalid_model_response"),
        ("r6", "model_unavailable"),
        ("r8", "invalid_model_response"),
    ):
        assert error[custom_id]["response"] is None
        assert error[custom_id]["error"]["code"] == code
    calls = simulator.calls()["prompts"]
    assert calls["status:400 kept"] == 1
    assert calls["status:500 kept"] == calls["drop kept"] == calls["empty kept"] == 5


def test_unusable_usage_is_delivered_and_not_billed(
    pipeline: MakePipeline, tables: EmbeddedWarehouse
) -> None:
    stages = pipeline()
    stages.start(*ROLES, "meter")
    kinds = ["null", "missing", "negative", "string", "float", "huge", "overcached"]
    prompts = ["ok odd"] + [f"usage:{kind} odd" for kind in kinds]
    batch = stages.create(record(f"r{i}", prompt) for i, prompt in enumerate(prompts))
    state = stages.wait_ended(batch)
    assert state.settled is not None
    assert state.settled.completed == len(prompts)
    assert state.settled.usage.unmetered_requests == len(kinds)
    assert state.settled.usage.billed_records == 1
    client = tables.client()
    until(
        lambda: (
            client.query(f"SELECT count() FROM billing.open_rejects WHERE batch_id = '{batch}'").first_row[0]
            == len(kinds)
        ),
        30,
        "unmetered answers are not listed",
    )
    client.close()


def test_one_call_has_one_time_limit(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline(Limits(request_time_limit_s=1.0, retry_backoff_s=0.05))
    stages.start(*ROLES)
    output, error = run(stages, ["ok limit", "hang limit", "drip:0.3 limit"])
    assert set(output) == {"r0"}
    for custom_id in ("r1", "r2"):
        assert error[custom_id]["error"]["code"] == "request_time_limit"
    calls = simulator.calls()["prompts"]
    assert calls["hang limit"] == calls["drip:0.3 limit"] == 1


def test_overload_is_waited_for_and_is_no_attempt(pipeline: MakePipeline, simulator: Simulator) -> None:
    stages = pipeline(msgspec.structs.replace(LIMITS, max_attempts=2))
    stages.start(*ROLES)
    output, _ = run(stages, [f"retry-after:0.2:3 wait {i}" for i in range(3)])
    assert len(output) == 3
    assert simulator.calls()["prompts"]["retry-after:0.2:3 wait 0"] == 4


def test_cancel_lets_running_calls_end_and_bills_only_them(
    pipeline: MakePipeline, simulator: Simulator
) -> None:
    stages = pipeline()
    simulator.control(latency_ms=300)
    stages.start(*ROLES)
    before = simulator.calls()["count"]
    batch = stages.create(record(f"r{i}", f"ok cancel {i}") for i in range(3000))
    until(lambda: simulator.calls()["count"] - before >= 300, 30, "calls have not begun")
    stages.cancel(batch)
    state = stages.wait_ended(batch)
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(3000)], output, error)
    assert terminal_status(state) is Status.CANCELLED
    assert 0 < len(output) < 3000
    assert len(output) == simulator.calls()["count"] - before
    assert {line["error"]["code"] for line in error} == {"batch_cancelled"}


def test_expiry_keeps_what_is_finished(pipeline: MakePipeline) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    prompts = ["ok expiry", *["hang expiry"] * 9]
    batch = stages.create((record(f"r{i}", prompt) for i, prompt in enumerate(prompts)), window_s=3.0)
    state = stages.wait_ended(batch)
    output, error = stages.lines(batch, "output"), stages.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(10)], output, error)
    assert terminal_status(state) is Status.EXPIRED
    assert len(output) == 1
    assert {line["error"]["code"] for line in error} == {"batch_expired"}


def test_expiry_needs_no_dispatcher(pipeline: MakePipeline) -> None:
    stages = pipeline()
    stages.start("intake", "settle", "sink")
    batch = stages.create((record(f"r{i}", "ok") for i in range(5)), window_s=1.0)
    state = stages.wait_ended(batch)
    check_batch(state, [f"r{i}" for i in range(5)], [], stages.lines(batch, "error"))
    assert terminal_status(state) is Status.EXPIRED


def test_large_bodies_and_answers_travel_by_reference(pipeline: MakePipeline) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    prompts = ["ok small", "ok " + "x" * 3_000_000, "big:5000000 large", "status:400 " + "y" * 400_000]
    output, error = run(stages, prompts)
    assert set(output) == {"r0", "r1", "r2"}
    assert len(output["r2"]["response"]["body"]["choices"][0]["message"]["content"]) == 5_000_000
    assert error["r3"]["response"]["status_code"] == 400
