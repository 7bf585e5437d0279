"""The second batch of the demonstration: tools and a workflow, on the servers of the examples."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.cli.demo_input import ENDPOINT
from services.embedded.ports import free_port
from services.process import spawn

EXAMPLES = Path(__file__).parents[2] / "examples"
"""Beside the packages in a checkout; an installed package has none."""

SERVERS = ("tool_executor", "mcp_server", "workflow_callback")
START_S = 60.0


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, int]]:
    """The examples' servers, each on a port of its own, by name; none where there are no examples."""
    ports = {name: free_port() for name in SERVERS} if EXAMPLES.is_dir() else {}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, port in ports.items():
            command = [sys.executable, "-P", str(EXAMPLES / f"{name}.py"), str(port)]
            child, _ = spawn(command, log=directory / f"{name}.log", environ={}, ready=False)
            running.append(child)
        for port in ports.values():
            _wait(port)
        yield ports
    finally:
        for child in running:
            child.kill()
            child.wait()


def write_input(path: Path, model: str, ports: dict[str, int]) -> int:
    """Write the input file; the number of its records."""
    modules = ["json", "asyncio", "decimal"]
    words = ["lambda", "python", "match"]
    records = []
    for kind, name, url, choices in (
        ("http", "count_lines", f"http://127.0.0.1:{ports['tool_executor']}/", {"module": modules}),
        ("mcp", "is_keyword", f"http://127.0.0.1:{ports['mcp_server']}/mcp", {"word": words}),
    ):
        properties = {key: {"type": "string", "enum": values} for key, values in choices.items()}
        tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
        body = {
            # The simulated model asks for tools as often as its prompt says.
            "messages": [{"role": "user", "content": "tools:3 Go through the list."}],
            "tools": [{"type": "function", "function": tool}],
            "openrelay": {"tool_config": {"type": kind, "url": url, "max_rounds": 3}},
        }
        records.append((f"tools-over-{kind}", body))
    workflow = {
        "url": f"http://127.0.0.1:{ports['workflow_callback']}/",
        "context": {"parts": ["Kafka keeps a log.", "A log is read in order.", "Order decides."]},
    }
    records.append(("map-and-reduce", {"openrelay": {"workflow": workflow}}))
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": model} | body}
        for custom_id, body in records
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def told(line: dict[str, Any]) -> str:
    """What a line of the output says, in one sentence."""
    body = line["response"]["body"]
    extra = body["openrelay"]
    if body["object"] == "workflow.result":
        steps, requests = extra["workflow_steps"], extra["workflow_requests"]
        return f"({steps} steps, {requests} requests) {body['output']['summary']}"
    content = body["choices"][0]["message"]["content"]
    return f"({extra['tool_rounds']} rounds of tools) {content}"


def _wait(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
