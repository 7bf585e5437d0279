"""Workflow records go through the stages: steps, limits, failures, what is billed, what a crash repeats."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from schemas.ids import BatchId
from schemas.settings import Limits
from streams.core.lifecycle import BatchState
from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch, check_ledger
from tests.support.customer import Callback, Customer
from tests.support.pipeline import Pipeline, record
from tests.support.settings import MODEL
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

ROLES = ("intake", "dispatch", "settle", "sink")


class Flows:
    """Workflow records of one batch, each with a callback of its own."""

    def __init__(self, customer: Customer) -> None:
        self.customer = customer
        self.records: list[dict[str, Any]] = []

    def add(self, callback: Callback, **config: Any) -> str:
        custom_id = f"r{len(self.records)}"
        name = f"{custom_id}-{time.monotonic_ns()}"
        self.customer.callbacks[name] = callback
        workflow = {"url": f"{self.customer.url}/flow/{name}", **config}
        self.records.append(
            {
                "custom_id": custom_id,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": MODEL, "openrelay": {"workflow": workflow}},
            }
        )
        return custom_id

    def steps(self, custom_id: str) -> list[int]:
        """The numbers of the callback's calls, as they came."""
        return [each.body["step"] for each in self.customer.received if each.body["custom_id"] == custom_id]

    def at(self, custom_id: str, step: int) -> bool:
        """Whether the last call of a record's callback was for this step."""
        return self.steps(custom_id)[-1:] == [step]


def ask(prompt: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **body}


def go_on(**prompts: str) -> dict[str, Any]:
    return {
        "status": "continue",
        "requests": [{"id": name, "body": ask(prompt)} for name, prompt in prompts.items()],
    }


def done(output: Any = None) -> dict[str, Any]:
    return {"status": "completed", "output": output}


def finish(
    pipeline: Pipeline, batch: BatchId, count: int
) -> tuple[BatchState, dict[str, Any], dict[str, Any]]:
    state = pipeline.wait_ended(batch)
    output, error = pipeline.lines(batch, "output"), pipeline.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(count)], output, error)
    return state, {x["custom_id"]: x for x in output}, {x["custom_id"]: x for x in error}


def check_rows(tables: EmbeddedWarehouse, state: BatchState, *expected: str) -> None:
    """The usage rows of the batch, by index and entry id, and their sums."""
    assert state.created is not None
    query = (
        "SELECT concat(toString(request_index), ' ', entry_id) AS row FROM billing.usage"
        f" WHERE batch_id = '{state.created.batch}' ORDER BY row"
    )
    client = tables.client()
    until(
        lambda: len(client.query(query).result_rows) >= len(expected),
        30,
        lambda: str(client.query(query).result_rows),
    )
    assert [row for (row,) in client.query(query).result_rows] == sorted(expected)
    check_ledger(client, state)
    client.close()


def test_map_and_reduce(pipeline: MakePipeline, customer: Customer, tables: EmbeddedWarehouse) -> None:
    def callback(asked: dict[str, Any]) -> dict[str, Any]:
        match asked["step"]:
            case 0:
                assert asked["results"] == []
                return go_on(a="usage:10/1/4 page one", b="usage:20/2 page two", c="status:400 page three")
            case 1:
                assert [each["id"] for each in asked["results"]] == ["a", "b", "c"]
                a, b, c = asked["results"]
                assert (a["status"], b["status"], c["status"]) == ("succeeded", "succeeded", "failed")
                assert a["response"]["status_code"] == 200
                assert a["error"] is None
                assert c["response"]["status_code"] == 400
                assert c["response"]["body"]["error"]["code"] == "context_length_exceeded"
                texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in (a, b)]
                return go_on(total=f"usage:5/7 {' and '.join(texts)}")
        return done({"said": asked["results"][0]["response"]["body"]["usage"]["completion_tokens"]})

    stages = pipeline()
    stages.start(*ROLES, "meter")
    flows = Flows(customer)
    flows.add(callback, context={"contract": 7}, authorization="Bearer x")
    batch = stages.create([*flows.records, record("r1", "usage:1/1 plain beside it")])
    state, output, _ = finish(stages, batch, 2)
    body = output["r0"]["response"]["body"]
    assert (body["object"], body["model"], body["output"]) == ("workflow.result", MODEL, {"said": 7})
    report = body["openrelay"]
    assert (report["workflow_steps"], report["workflow_requests"]) == (2, 4)
    assert report["usage"]["input_tokens"] == 35
    assert report["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert report["usage"]["output_tokens"] == 10
    assert flows.steps("r0") == [0, 1, 2]
    assert all(each.body["context"] == {"contract": 7} for each in customer.received)
    assert all(each.headers["Authorization"] == "Bearer x" for each in customer.received)
    check_rows(tables, state, "0 usage:0:a", "0 usage:0:b", "0 usage:1:total", "1 usage")


def test_every_way_to_end(pipeline: MakePipeline, customer: Customer, tables: EmbeddedWarehouse) -> None:
    flows = Flows(customer)
    first = go_on(a="usage:3/2 first")

    def after_one(answer: Any) -> Callback:
        return lambda asked: first if asked["step"] == 0 else answer

    malformed = [
        {"status": "x"},
        {"status": "continue"},
        {"status": "continue", "requests": []},
        {"status": "continue", "requests": [{"id": "b"}]},
        {"status": "continue", "requests": [{"id": 7, "body": {}}]},
        {"status": "continue", "requests": [{"id": "b", "body": []}]},
        {"status": "continue", "requests": [{"id": "", "body": {}}]},
        {"status": "continue", "requests": [{"id": "b", "body": {}}, {"id": "b", "body": {}}]},
        {"status": "continue", "requests": [{"id": "b", "body": {}}, {"id": "a", "body": {}}]},
        {"status": "failed"},
        {"status": "failed", "error": "no"},
        [],
        None,
        web.Response(text="<p>hello"),
        web.Response(text='{"status":"completed","status":"completed"}'),
        web.Response(status=204),
        web.Response(status=404),
        web.Response(status=302, headers={"Location": "/"}),
    ]
    expected = {}
    for answer in malformed:
        code = "workflow_callback_failed"
        expected[flows.add(after_one(answer))] = (code, (1, 1))
    failed = {"status": "failed", "error": {"code": "E7", "message": "no pages"}}
    by_them = flows.add(after_one(failed))
    expected[by_them] = ("workflow_failed", (1, 1))
    no_code = flows.add(lambda asked: {"status": "failed", "error": {"message": "no pages"}})
    expected[no_code] = ("workflow_failed", (0, 0))
    over = "workflow_limit_exceeded"
    endless = go_on(a="usage:3/2 first"), go_on(b="usage:3/2 second"), go_on(c="usage:3/2 third")
    expected[flows.add(lambda asked: endless[asked["step"]], max_steps=2)] = (over, (2, 2))
    expected[flows.add(after_one(go_on(b="x", c="y")), max_requests=2)] = (over, (1, 1))
    many = {"status": "continue", "requests": [{"id": str(i), "body": {}} for i in range(200_000)]}
    expected[flows.add(lambda asked: many)] = (over, (0, 0))
    expected[flows.add(lambda asked: go_on(**{f"a{asked['step']}": "usage:6/4 tokens"}), max_tokens=20)] = (
        over,
        (3, 2),
    )
    bare = flows.add(lambda asked: {"status": "completed"})

    stages = pipeline()
    stages.start(*ROLES, "meter")
    batch = stages.create(flows.records)
    state, output, error = finish(stages, batch, len(flows.records))
    for custom_id, (code, (steps, requests)) in expected.items():
        line = error[custom_id]
        assert line["error"]["code"] == code, line
        report = line["openrelay"]
        assert (report["workflow_steps"], report["workflow_requests"]) == (steps, requests), line
        assert line["response"] is None
    assert error[by_them]["error"]["message"] == "E7: no pages"
    assert error[no_code]["error"]["message"] == "no pages"
    assert output.keys() == {bare}
    assert output[bare]["response"]["body"]["output"] is None
    billed = Counter()
    for line in error.values():
        billed[line["custom_id"]] = line["openrelay"]["usage"]["input_tokens"]
    assert state.settled is not None
    assert state.settled.usage.input == sum(billed.values())
    assert billed[by_them] == 3
    client = tables.client()
    until(
        lambda: (
            client.query(
                f"SELECT status FROM billing.batches FINAL WHERE batch_id = '{batch}' AND is_terminal"
            ).result_rows
        ),
        30,
        "the batch is not in billing.batches",
    )
    mismatches = f"SELECT * FROM billing.batch_mismatches WHERE batch_id = '{batch}'"
    until(
        lambda: not client.query(mismatches).row_count,
        30,
        lambda: str(client.query(mismatches).result_rows),
    )
    check_ledger(client, state)
    client.close()


def test_requests_that_may_not_run_and_requests_that_fail(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    results: dict[str, Any] = {}

    def callback(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["step"] == 1:
            results.update({each["id"]: each for each in asked["results"]})
            return done()
        bodies = {
            "other": ask("never", model="gpt-0"),
            "same": ask("usage:1/1 same", model=MODEL),
            "stream": ask("never", stream=True),
            "no stream": ask("usage:1/1 no stream", stream=False),
            "nested": ask("never", openrelay={}),
            "slow": ask("hang flow"),
            "drops": ask("drop flow"),
            "empty": ask("empty flow"),
            "unmetered": ask("usage:null flow"),
        }
        return {"status": "continue", "requests": [{"id": k, "body": body} for k, body in bodies.items()]}

    stages = pipeline(Limits(request_time_limit_s=1.0, retry_backoff_s=0.02, max_attempts=3))
    stages.start(*ROLES)
    flows = Flows(customer)
    flows.add(callback)
    state, output, _ = finish(stages, stages.create(flows.records), 1)
    codes = {name: (each["error"] or {}).get("code") for name, each in results.items()}
    assert codes == {
        "other": "model_mismatch",
        "same": None,
        "stream": "stream_not_supported",
        "no stream": None,
        "nested": "invalid_openrelay",
        "slow": "request_time_limit",
        "drops": "model_unavailable",
        "empty": "invalid_model_response",
        "unmetered": None,
    }
    report = output["r0"]["response"]["body"]["openrelay"]
    assert report["workflow_requests"] == 6
    assert report["usage"]["unmetered_requests"] == 1
    assert state.settled is not None
    assert state.settled.usage.unmetered_requests == 1
    assert state.settled.usage.input == 2
    assert simulator.calls()["prompts"]["drop flow"] == 3
    assert "never" not in simulator.calls()["prompts"]


def test_large_results_take_a_bounded_part_of_the_memory(pipeline: MakePipeline, customer: Customer) -> None:
    def callback(requests: int) -> Callback:
        prompts = {f"q{i}": f"big:7000000 usage:1/1 {i}" for i in range(requests)}
        return lambda asked: done() if asked["step"] else go_on(**prompts)

    stages = pipeline(slots=8)
    stages.start(*ROLES)
    before = stages.peak_mib("dispatch")
    flows = Flows(customer)
    too_many = {flows.add(callback(12)) for _ in range(6)}
    enough = {flows.add(callback(4)) for _ in range(6)}
    batch = stages.create(flows.records)
    _, output, error = finish(stages, batch, 12)
    grown = stages.peak_mib("dispatch") - before
    print(f"dispatch: {before} MiB, and {grown} MiB more at its peak")
    assert output.keys() == enough
    assert error.keys() == too_many
    for line in error.values():
        assert line["error"]["code"] == "workflow_limit_exceeded"
        assert "32 MiB" in line["error"]["message"]
        report = line["openrelay"]
        assert 5 <= report["workflow_requests"] == report["usage"]["input_tokens"] <= 12
    assert grown <= 500


def test_a_callback_that_is_not_there_is_called_again_with_the_same_step(
    pipeline: MakePipeline, customer: Customer
) -> None:
    seen: Counter[int] = Counter()

    def callback(asked: dict[str, Any]) -> Any:
        seen[asked["step"]] += 1
        if seen[asked["step"]] < 3:
            return web.Response(status=500 + asked["step"])
        return go_on(a="usage:1/1 again") if asked["step"] == 0 else done()

    stages = pipeline(Limits(retry_backoff_s=0.02, max_attempts=3))
    stages.start(*ROLES)
    flows = Flows(customer)
    flows.add(callback)
    flows.add(lambda asked: web.Response(status=503))
    _, output, error = finish(stages, stages.create(flows.records), 2)
    assert flows.steps("r0") == [0, 0, 0, 1, 1, 1]
    assert output.keys() == {"r0"}
    assert error["r1"]["error"]["code"] == "workflow_callback_failed"
    assert flows.steps("r1") == [0, 0, 0]


def test_a_restarted_dispatcher_goes_on_behind_the_last_finished_step(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator, tables: EmbeddedWarehouse
) -> None:
    blocked = {"r0": 2, "r1": 1}

    async def callback(asked: dict[str, Any]) -> Any:
        if asked["step"] == blocked[asked["custom_id"]]:
            await customer.held()
        if asked["step"] < 3:
            step = asked["step"]
            prompt = f"usage:1/1 restart {asked['custom_id']} step {step}"
            return go_on(**{f"a{step}": prompt, f"b{step}": "big:300000 x"})
        return done(len(asked["results"]))

    stages = pipeline()
    stages.start(*ROLES, "meter")
    flows = Flows(customer)
    flows.add(callback)
    flows.add(callback)
    batch = stages.create(flows.records)
    until(lambda: flows.at("r0", 2) and flows.at("r1", 1), 30, "the callbacks are not there")
    stages.kill("dispatch")
    customer.release()
    stages.start("dispatch")
    state, output, _ = finish(stages, batch, 2)
    assert flows.steps("r0") == [0, 1, 2, 2, 3]
    assert flows.steps("r1") == [0, 1, 1, 2, 3]
    first, second = (
        each.body["results"]
        for each in customer.received
        if (each.body["custom_id"], each.body["step"]) == ("r0", 2)
    )
    assert first == second
    prompts = simulator.calls()["prompts"]
    for custom_id in ("r0", "r1"):
        for step in range(3):
            assert prompts[f"usage:1/1 restart {custom_id} step {step}"] == 1
        report = output[custom_id]["response"]["body"]["openrelay"]
        assert (report["workflow_steps"], report["workflow_requests"]) == (3, 6)
    check_rows(
        tables,
        state,
        *(f"{i} usage:{step}:{name}{step}" for i in range(2) for step in range(3) for name in "ab"),
    )


@pytest.mark.parametrize("dispatcher", ["alive", "dead"])
def test_a_batch_that_expires_bills_the_finished_steps(
    pipeline: MakePipeline, customer: Customer, tables: EmbeddedWarehouse, dispatcher: str
) -> None:
    async def callback(asked: dict[str, Any]) -> Any:
        if asked["step"] == 1:
            await asyncio.sleep(30)
        return go_on(a="usage:10/5 expires", b="usage:1/1 expires")

    async def silent(asked: dict[str, Any]) -> Any:
        await asyncio.sleep(30)

    stages = pipeline()
    stages.start(*ROLES, "meter")
    flows = Flows(customer)
    flows.add(callback)
    flows.add(callback)
    flows.add(silent)
    batch = stages.create([*flows.records, record("r3", "hang expires")], window_s=4.0)
    until(
        lambda: flows.at("r0", 1) and flows.at("r1", 1) and flows.at("r2", 0),
        30,
        "the callbacks are not there",
    )
    if dispatcher == "dead":
        stages.kill("dispatch")
    state, output, error = finish(stages, batch, 4)
    assert not output
    assert {line["error"]["code"] for line in error.values()} == {"batch_expired"}
    assert "openrelay" not in error["r3"]
    report = error["r2"]["openrelay"]
    assert (report["workflow_steps"], report["workflow_requests"]) == (0, 0)
    for custom_id in ("r0", "r1"):
        report = error[custom_id]["openrelay"]
        assert (report["workflow_steps"], report["workflow_requests"]) == (1, 2)
        assert report["usage"]["input_tokens"] == 11
    check_rows(tables, state, "0 usage:0:a", "0 usage:0:b", "1 usage:0:a", "1 usage:0:b")


def test_a_cancelled_batch_lets_running_workflows_end(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:

    async def callback(asked: dict[str, Any]) -> Any:
        if asked["step"] == 1:
            await customer.held()
        step = asked["step"]
        return go_on(**{f"a{step}": f"usage:1/1 cancelled {step}"}) if step < 2 else done("whole")

    def retries(asked: dict[str, Any]) -> Any:
        return go_on(a="usage:4/4 before", b="retry-after:30:9 cancelled")

    stages = pipeline()
    stages.start(*ROLES)
    flows = Flows(customer)
    flows.add(callback)
    flows.add(retries)
    batch = stages.create(flows.records)
    until(lambda: flows.at("r0", 1), 30, "the callback is not there")
    until(lambda: simulator.calls()["prompts"].get("retry-after:30:9 cancelled"), 30, "it does not wait")
    stages.cancel(batch)
    until(lambda: stages.state(batch).cancelled, 30, "the cancel is not known")
    customer.release()
    _, output, error = finish(stages, batch, 2)
    assert output["r0"]["response"]["body"]["output"] == "whole"
    assert error["r1"]["error"]["code"] == "batch_cancelled"
    assert error["r1"]["openrelay"]["usage"]["input_tokens"] == 4


def test_a_cancelled_batch_does_not_jump_the_queue(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    """What still runs of it makes many calls more, each in its turn beside those of others."""
    records, requests, slots = 6, 60, 8

    def callback(asked: dict[str, Any]) -> Any:
        if asked["step"] == 0:
            return go_on(**{f"a{i}": f"usage:1/1 queue {asked['custom_id']} {i}" for i in range(requests)})
        return done()

    stages = pipeline(slots=slots)
    simulator.control(latency_ms=200)
    stages.start(*ROLES)
    flows = Flows(customer)
    for _ in range(records):
        flows.add(callback)
    cancelled = stages.create(flows.records, organization="org_cancels")
    until(lambda: simulator.stats()["running"] == slots, 30, lambda: stages.explain(cancelled))
    stages.cancel(cancelled)
    until(lambda: stages.state(cancelled).cancelled, 30, "the cancel is not known")
    other = stages.create((record(f"p{i}", "ok queue") for i in range(slots)), organization="org_waits")
    stages.wait_ended(other)
    assert stages.state(cancelled).settled is None, "it went first"
    finish(stages, cancelled, records)


@pytest.mark.faults
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_instant_lose_and_double_nothing(
    pipeline: MakePipeline, customer: Customer, tables: EmbeddedWarehouse, seed: int
) -> None:
    """Workflows and tools while dispatch and settle are killed again and again."""
    chance = random.Random(seed)

    async def callback(asked: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        step, name = asked["step"], asked["custom_id"]
        if step == 4:
            return done(step) if int(name[1:]) % 3 else {"status": "failed", "error": {"message": "no"}}
        assert step == 0 or len(asked["results"]) == 2
        prompts = f"usage:7/{step} slow:0.05 kills {name}", f"usage:1/1 kills {name}"
        return go_on(**{f"{each}{step}": prompt for each, prompt in zip("ab", prompts, strict=True)})

    stages = pipeline()
    stages.start(*ROLES, "meter")
    flows = Flows(customer)
    for _ in range(30):
        flows.add(callback)
    tool_config = {"url": f"{customer.url}/tools/slow/0.1"}
    tools = [
        record(f"r{i}", f"tools:3 usage:2/1 kills {seed} {i}", openrelay={"tool_config": tool_config})
        for i in range(30, 60)
    ]
    batch = stages.create([*flows.records, *tools])
    until(lambda: customer.received, 30, "nothing runs")
    for _ in range(5):
        pause_s = chance.uniform(0.1, 0.8)
        since = time.monotonic()
        until(lambda: time.monotonic() - since > pause_s, 5, "the clock stands")  # noqa: B023
        role = chance.choice(["dispatch", "dispatch", "settle"])
        stages.kill(role)
        stages.start(role)
    state, output, error = finish(stages, batch, 60)
    # Whoever was running at three crashes is given up, as promised; what it had finished is billed.
    given_up = {name for name, line in error.items() if line["error"]["code"] == "processing_failed"}
    rows = []
    for i in range(30):
        name = f"r{i}"
        assert name in given_up or (name in error) == (i % 3 == 0)
        line = error.get(name) or output[name]["response"]["body"]
        report = line["openrelay"]
        steps = report["workflow_steps"]
        assert name in given_up or steps == 4
        assert report["workflow_requests"] == 2 * steps
        rows += [f"{i} usage:{step}:{each}{step}" for step in range(steps) for each in "ab"]
    for i in range(30, 60):
        if f"r{i}" not in given_up:
            assert output[f"r{i}"]["response"]["body"]["usage"]["prompt_tokens"] == 8
            rows.append(f"{i} usage")
    assert len(given_up) <= 2
    check_rows(tables, state, *rows)
