"""Tools and workflows on a whole stack, through its API: 200 records over an SDK server, secrets nowhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.customer import Customer
from tests.support.mcp_process import McpServer
from tests.support.stack import Stack

MODEL = "openrelay/gpt-oss-120b"
CONFIG: dict[str, Any] = {"egress": {"allow_cidrs": ["127.0.0.0/8"], "allow_http": True}}
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        },
    },
}


@pytest.fixture
def customer() -> Iterator[Customer]:
    with Customer() as running:
        yield running


def record(custom_id: str, prompt: str, openrelay: dict[str, Any]) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "tools": [TOOL]}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body | {"openrelay": openrelay},
    }


def test_two_hundred_records_with_tools_and_a_workflow(tmp_path: Path, customer: Customer) -> None:
    canary = f"canary{os.urandom(8).hex()}"
    secrets = {"authorization": f"Bearer {canary}", "context": {"token": canary}}

    def callback(asked: dict[str, Any]) -> Any:
        if asked["step"]:
            return {"status": "completed", "output": len(asked["results"])}
        requests = [
            {"id": f"q{i}", "body": {"messages": [{"role": "user", "content": "ok"}]}} for i in range(5)
        ]
        return {"status": "continue", "requests": requests}

    customer.callbacks[canary] = callback
    with McpServer(tmp_path, 2) as server, Stack(tmp_path / "stack", CONFIG) as stack:
        over_mcp = {"type": "mcp", "url": f"{server.url}?{canary}", "timeout_ms": 60_000} | secrets
        records = [record(f"m{i}", f"tools:2:2 mcp {i}", {"tool_config": over_mcp}) for i in range(200)]
        over_http = {"url": f"{customer.url}/tools?{canary}"} | secrets
        records += [record(f"h{i}", f"tools:1 http {i}", {"tool_config": over_http}) for i in range(20)]
        broken = {"url": f"{customer.url}/tools/status/500?{canary}"} | secrets
        records += [record(f"b{i}", f"tools:1 broken {i}", {"tool_config": broken}) for i in range(5)]
        flow = {"url": f"{customer.url}/flow/{canary}"} | secrets
        records += [record(f"w{i}", "", {"workflow": flow}) for i in range(10)]
        private = {"url": "http://10.0.0.1/"} | secrets
        records += [record("refused", "", {"tool_config": private})]

        key = stack.connection["api_key"]
        with httpx.Client(
            base_url=stack.connection["base_url"],
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
            trust_env=False,
        ) as client:
            created = client.post(
                "/batches",
                json={
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                    "requests": [
                        {"url": "/v1/chat/completions", "method": "POST"} | each for each in records
                    ],
                },
            )
            assert created.status_code == 200, created.text
            batch = created.json()
            assert [each["code"] for each in batch["errors"]["data"]] == ["invalid_tool_config"]
            assert canary not in created.text
            stack.until(
                lambda: client.get(f"/batches/{batch['id']}").json()["status"] == "completed",
                "the batch does not end",
                120,
            )
            ended = client.get(f"/batches/{batch['id']}")
            files = [
                client.get(f"/files/{ended.json()[f'{which}_file_id']}/content").text
                for which in ("output", "error")
            ]
            output, error = ([json.loads(line) for line in text.splitlines()] for text in files)
        assert ended.json()["request_counts"] == {"total": 236, "completed": 230, "failed": 6}
        assert {line["error"]["code"] for line in error} == {"tool_execution_failed", "invalid_tool_config"}
        for line in output[:200]:
            assert line["response"]["body"]["openrelay"] == {"tool_rounds": 2}
            assert "18 degrees in Oslo" in line["response"]["body"]["choices"][0]["message"]["content"]
        assert [line["response"]["body"]["output"] for line in output[220:]] == [5] * 10
        said = [created.text, ended.text, *files]
        said += [httpx.get(f"{stack.connection['control_url']}/metrics", trust_env=False).text]
        assert not any(canary in text for text in said)
        data = stack.directory / "data"
        assert stack.terminate() == 0
    searched = 0
    for path in data.rglob("*"):
        # The input itself is kept as it came; storage is encrypted at rest.
        kept = path.match("blobs/uploads/*") or path.match("blobs/batches/*/input*.jsonl")
        if path.is_file() and not kept:
            searched += 1
            assert canary.encode() not in path.read_bytes(), path
    assert searched > 50
