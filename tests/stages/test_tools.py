"""Records with tools go through the stages: turns, results of tools, usage, failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from schemas.ids import BatchId
from tests.stages.conftest import MakePipeline
from tests.support.check import check_batch
from tests.support.customer import Customer
from tests.support.pipeline import Pipeline, record
from tests.support.simulator import Simulator

ROLES = ("intake", "dispatch", "settle", "sink")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture
def customer() -> Iterator[Customer]:
    with Customer() as running:
        yield running


def with_tools(custom_id: str, prompt: str, url: str, **config: Any) -> dict[str, Any]:
    return record(custom_id, prompt, tools=TOOLS, openrelay={"tool_config": {"url": url, **config}})


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
