"""Records with tools go through the stages: turns, results of tools, usage, failures."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import topics
from schemas.ids import BatchId
from schemas.settings import Secrets
from streams.kafka.admin import Admin
from streams.kafka.reader import PositionReader
from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch
from tests.support.customer import Customer
from tests.support.mcp_process import McpServer
from tests.support.pipeline import TOOLS, Pipeline, record, with_tools
from tests.support.settings import MODEL
from tests.support.simulator import Simulator
from tests.support.until import until
from tests.support.warehouse import EmbeddedWarehouse

ROLES = ("intake", "dispatch", "settle", "sink")
USER = {"role": "user", "content": "ok"}


def lines(pipeline: Pipeline, batch: BatchId, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    state = pipeline.wait_ended(batch)
    output, error = pipeline.lines(batch, "output"), pipeline.lines(batch, "error")
    check_batch(state, [f"r{i}" for i in range(count)], output, error)
    return {x["custom_id"]: x for x in output}, {x["custom_id"]: x for x in error}


def test_a_record_calls_its_tools_between_turns(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    url = f"{customer.url}/tools"
    batch = stages.create(
        [
            with_tools("r0", "tools:2:2 usage:10/5/4/1 rounds", url, context={"contract": 7}),
            with_tools("r1", "tools:0 rounds", url),
            with_tools("r2", "tools:5 usage:3/2 used up", url, max_rounds=2),
            with_tools("r3", "tools:2 at:1 usage:null unmetered", url),
            with_tools("r4", "tools:3 failing", f"{customer.url}/tools/round/2/500"),
            with_tools("r5", "tools:2 at:1 status:400 refused", url),
            record("r6", "tools:1 of nobody", tools=TOOLS),
        ]
    )
    output, error = lines(stages, batch, 7)
    body = output["r0"]["response"]["body"]
    assert body["openrelay"] == {"tool_rounds": 2}
    assert body["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 15,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 12},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert 'lookup({"city":"city 1"})' in body["choices"][0]["message"]["content"]
    sent = [each for each in customer.received if each.body["custom_id"] == "r0"]
    assert [len(each.body["tool_calls"]) for each in sent] == [2, 2]
    assert all(each.body["context"] == {"contract": 7} for each in sent)
    assert "openrelay" not in output["r1"]["response"]["body"]
    assert output["r2"]["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls"
    assert output["r2"]["response"]["body"]["openrelay"] == {"tool_rounds": 2}
    assert output["r2"]["response"]["body"]["usage"]["prompt_tokens"] == 9
    assert output["r3"]["response"]["body"]["usage"] is None
    assert error["r4"]["error"]["code"] == "tool_execution_failed"
    assert error["r5"]["response"]["status_code"] == 400
    assert output["r6"]["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_record_that_waits_for_its_tools_holds_no_slot(pipeline: MakePipeline, customer: Customer) -> None:
    stages = pipeline(slots=8)
    stages.start(*ROLES)
    slow = f"{customer.url}/tools/slow/5"
    batch = stages.create(with_tools(f"r{i}", f"tools:1 waits {i}", slow) for i in range(60))
    until(lambda: customer.running >= 60, 20, lambda: f"{customer.running} tools run")
    plain = stages.create(record(f"r{i}", f"ok meanwhile {i}") for i in range(100))
    stages.wait_ended(plain)
    assert len(stages.lines(plain, "output")) == 100
    assert customer.running == 60, "all tools still run"
    output, _ = lines(stages, batch, 60)
    assert len(output) == 60


def test_a_cancelled_batch_lets_tools_and_the_turns_behind_them_end(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    stages = pipeline(slots=4)
    stages.start(*ROLES)
    slow = f"{customer.url}/tools/slow/1"
    records = [with_tools(f"r{i}", f"tools:2 usage:2/1 cancel tools {i}", slow) for i in range(10)]
    records += [with_tools("r10", "retry-after:30:9 cancel tools", slow)]
    batch = stages.create(records)
    until(lambda: len(customer.received) >= 10, 30, "the tools are not called")
    until(lambda: simulator.calls()["prompts"].get("retry-after:30:9 cancel tools"), 30, "it does not wait")
    stages.cancel(batch)
    output, error = lines(stages, batch, 11)
    assert len(output) == 10
    assert all(line["response"]["body"]["openrelay"] == {"tool_rounds": 2} for line in output.values())
    assert error["r10"]["error"]["code"] == "batch_cancelled"


def test_the_window_ends_over_a_tool(pipeline: MakePipeline, customer: Customer) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    url = f"{customer.url}/tools"
    batch = stages.create(
        [with_tools("r0", "tools:1 window", f"{url}/slow/30"), with_tools("r1", "tools:1 window", url)],
        window_s=3.0,
    )
    output, error = lines(stages, batch, 2)
    assert output.keys() == {"r1"}
    assert error["r0"]["error"]["code"] == "batch_expired"


def test_a_session_is_closed_however_its_record_ends(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    url = f"{customer.url}/mcp/session"
    waits = "tools:2 at:1 retry-after:30:9 session"
    cancelled = stages.create([with_tools("r0", waits, url, type="mcp")])
    until(lambda: simulator.calls()["prompts"].get(waits, 0) >= 2, 30, "the second turn is not tried")
    assert len(customer.sessions) == 1
    stages.cancel(cancelled)
    until(lambda: not customer.sessions, 10, "the session of the cancelled record is open")

    failing = stages.create([with_tools("r0", "tools:2 at:1 status:400 session", url, type="mcp")])
    expired = stages.create(
        [
            with_tools("r0", "tools:2 session", f"{url}/30", type="mcp"),
            with_tools("r1", "tools:2 at:1 slow:30 session", url, type="mcp"),
        ],
        window_s=4.0,
    )
    until(lambda: len(customer.sessions) >= 2, 30, "the tools are not called")
    _, error = lines(stages, expired, 2)
    assert {line["error"]["code"] for line in error.values()} == {"batch_expired"}
    lines(stages, failing, 1)
    lines(stages, cancelled, 1)
    until(lambda: not customer.sessions, 10, lambda: f"{customer.sessions} are open")


def test_a_killed_dispatcher_runs_the_loop_again_with_the_same_ids(
    pipeline: MakePipeline, customer: Customer
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    batch = stages.create([with_tools("r0", "tools:2 usage:2/1 killed", f"{customer.url}/tools/slow/1")])
    until(lambda: len(customer.received) == 2, 30, "the second round is not there")
    stages.kill("dispatch")
    stages.start("dispatch")
    output, _ = lines(stages, batch, 1)
    ids = [each.body["tool_calls"][0]["id"] for each in customer.received]
    assert ids == [ids[0], ids[1]] * 2
    assert output["r0"]["response"]["body"]["usage"]["prompt_tokens"] == 6


def test_a_large_body_goes_through_the_loop_by_reference(pipeline: MakePipeline, customer: Customer) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    url = f"{customer.url}/tools"
    prompts = ["tools:2 " + "x" * 1_000_000, "tools:1 " + "y" * 300_000]
    output, _ = lines(
        stages, stages.create(with_tools(f"r{i}", prompt, url) for i, prompt in enumerate(prompts)), 2
    )
    assert output["r0"]["response"]["body"]["openrelay"] == {"tool_rounds": 2}


def test_large_results_of_tools_take_a_bounded_part_of_the_memory(
    pipeline: MakePipeline, customer: Customer
) -> None:
    stages = pipeline(slots=16)
    stages.start(*ROLES)
    before = stages.peak_mib("dispatch")
    large = f"{customer.url}/tools/size/{7 << 20}"
    endless = [with_tools(f"r{i}", f"tools:8 endless {i}", large) for i in range(8)]
    several = [with_tools(f"r{i}", f"tools:3 several {i}", large) for i in range(8, 16)]
    batch = stages.create(endless + several)
    output, error = lines(stages, batch, 16)
    grown = stages.peak_mib("dispatch") - before
    print(f"dispatch: {before} MiB, and {grown} MiB more at its peak")
    assert output.keys() == {f"r{i}" for i in range(8, 16)}
    for line in error.values():
        assert line["error"]["code"] == "tool_execution_failed"
        assert "32 MiB" in line["error"]["message"]
    assert grown <= 400


@pytest.mark.parametrize(("sdk", "options"), [(1, ()), (2, ("stateless", "json"))])
def test_two_hundred_records_over_one_mcp_server(
    pipeline: MakePipeline, tmp_path: Path, sdk: int, options: tuple[str, ...]
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    with McpServer(tmp_path, sdk, *options) as server:
        batch = stages.create(
            with_tools(f"r{i}", f"tools:2:2 usage:2/1 mcp {i}", server.url, type="mcp", timeout_ms=60_000)
            for i in range(200)
        )
        output, _ = lines(stages, batch, 200)
    assert len(output) == 200
    for line in output.values():
        body = line["response"]["body"]
        assert body["openrelay"] == {"tool_rounds": 2}
        assert "18 degrees in city" in body["choices"][0]["message"]["content"]


def test_what_customers_entrust_to_us_is_nowhere(
    request: pytest.FixtureRequest,
    pipeline: MakePipeline,
    customer: Customer,
    tables: EmbeddedWarehouse,
    tmp_path: Path,
) -> None:
    """Authorization, context and URL are in the batch's own input and nowhere else: all is searched."""
    canary = f"canary{os.urandom(8).hex()}"
    secrets = {"authorization": f"Bearer {canary}", "context": {"token": canary, canary: 1}}

    def callback(asked: dict[str, Any]) -> Any:
        if asked["step"]:
            return {"status": "failed", "error": {"message": "not today"}}
        return {"status": "continue", "requests": [{"id": "a", "body": {"messages": [USER]}}]}

    customer.callbacks[canary] = callback
    tools = f"{customer.url}/tools"
    secret = f"?{canary}"
    log = tmp_path / "model-calls.jsonl"
    model = Simulator(tmp_path, "--call-log", str(log))
    request.addfinalizer(model.stop)
    model.start()
    model.control(log_bodies=True)
    stages = pipeline(pool_url=model.url)
    stages.start(*ROLES, "meter")
    workflow = {"model": MODEL, "openrelay": {"workflow": {"url": f"{customer.url}/flow/{canary}"} | secrets}}
    batch = stages.create(
        [
            with_tools("r0", "tools:1 canary", tools + secret, **secrets),
            with_tools("r1", "tools:1 canary", f"{tools}/status/500{secret}", **secrets),
            with_tools("r2", "tools:1 canary", f"http://127.0.0.1:1/{canary}", **secrets),
            with_tools("r3", "tools:1 canary", f"http://{canary}.invalid/", **secrets),
            with_tools("r4", "tools:1 canary", f"http://10.0.0.1/{canary}", **secrets),
            with_tools("r5", "tools:1 canary", tools + secret, type="mcp", **secrets),
            with_tools("r6", "tools:1 canary" + "x" * 300_000, tools + secret, **secrets),
            with_tools("r7", "tools:1 canary", f"{tools}/slow/9{secret}", timeout_ms=200, **secrets),
            record("r8", "") | {"body": workflow},
        ]
    )
    output, error = lines(stages, batch, 9)
    assert output.keys() == {"r0", "r6"}
    assert {line["error"]["code"] for name, line in error.items() if name != "r8"} == {
        "tool_execution_failed"
    }
    assert error["r8"]["error"]["code"] == "workflow_failed"
    assert any(canary in str(each.headers) for each in customer.received)
    state = stages.state(batch)
    client = tables.client()
    until(
        lambda: client.query(f"SELECT 1 FROM billing.batches FINAL WHERE batch_id = '{batch}'").row_count,
        30,
        "the meter has not come this far",
    )
    warehouse = {
        f"table {database}.{table}": str(
            client.query(f"SELECT * FROM {database}.{table}").result_rows
        ).encode()
        for database, table in client.query(
            "SELECT database, name FROM system.tables WHERE database NOT IN"
            " ('system', 'information_schema', 'INFORMATION_SCHEMA')"
        ).result_rows
    }
    client.close()
    for name in list(stages.children):
        assert stages.stop(name) == 0
    model.stop()
    assert b"tools:1 canary" in log.read_bytes()
    assert state.created is not None
    places = warehouse | dict(everything(stages, tmp_path, tables.directory))
    own = f"blob {state.created.input_object}"
    assert canary.encode() in places.pop(own)
    assert len(places) > 20
    assert [place for place, held in places.items() if canary.encode() in held] == []


def everything(stages: Pipeline, *directories: Path) -> Iterator[tuple[str, bytes]]:
    """All that is stored and said: objects, files, and every message of every topic."""
    for name in stages.blobs.list(""):
        yield f"blob {name}", stages.blobs.read(name)
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file() and path.name != "settings.json":
                yield f"file {path}", path.read_bytes()
    admin = Admin(stages.settings.kafka, "test-everything-admin")
    reader = PositionReader(stages.settings.kafka, "test-everything", 1)
    try:
        names = [topic.name for topic in topics.CATALOGUE] + [topics.requests_name(MODEL)]
        for topic, count in admin.partitions(names).items():
            parts = [(topic, p) for p in range(count)]
            firsts, ends = admin.first_offsets(parts), admin.end_offsets(parts)
            for part in parts:
                held = [
                    (message.key or "").encode() + b"\n" + (message.value or b"")
                    for message in reader.read_to_end(*part, firsts[part], ends[part], 60.0)
                ]
                yield f"topic {part}", b"\n".join(held)
    finally:
        reader.close()


def test_a_stopping_dispatcher_lets_tools_and_the_turns_behind_them_end(
    pipeline: MakePipeline, customer: Customer, simulator: Simulator
) -> None:
    stages = pipeline()
    stages.start(*ROLES)
    slow = f"{customer.url}/tools/slow/1"
    batch = stages.create(with_tools(f"r{i}", f"tools:2 drains {i}", slow) for i in range(20))
    until(lambda: len(customer.received) >= 20, 30, "the tools are not called")
    assert stages.stop("dispatch") == 0
    stages.start("dispatch")
    output, _ = lines(stages, batch, 20)
    assert len(output) == 20
    assert len(customer.received) == 40, "no tool was called twice"


def test_a_record_that_no_key_opens_is_given_up_and_harms_no_other(
    pipeline: MakePipeline, customer: Customer
) -> None:
    stages = pipeline()
    other = base64.b64encode(bytes(32)).decode()
    stages.config.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(stages.settings, secrets=Secrets(keys=(other,))))
    )
    stages.start(*ROLES)
    records = [with_tools("r0", "tools:1 sealed", f"{customer.url}/tools")]
    records += [record(f"r{i}", f"ok beside sealed {i}") for i in range(1, 30)]
    batch = stages.create(records)
    until(
        lambda: stages.revived() and stages.state(batch).ended is not None, 120, lambda: stages.explain(batch)
    )
    output, error = lines(stages, batch, 30)
    assert len(output) == 29
    assert error["r0"]["error"]["code"] == "processing_failed"
    assert not customer.received
