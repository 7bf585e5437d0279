"""What the benchmarks share: a stack on a simulated pool, batches through its HTTP API, and their cost."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.support.memory import peak_mib
from tests.support.simulator import Simulator
from tests.support.stack import Stack
from tests.support.until import until

MODEL = "openrelay/gpt-oss-120b"
KEYS = {"org_a": "or_bench_a_0123456789abcdef", "org_b": "or_bench_b_0123456789abcdef"}
RECORD_BYTES = 700
TERMINAL = ("completed", "failed", "expired", "cancelled")


class Rig(NamedTuple):
    stack: Stack
    simulator: Simulator
    clients: dict[str, httpx.Client]

    def create(self, organization: str, records: bytes) -> str:
        """Upload a file and create a batch of it; its id."""
        client = self.clients[organization]
        file = client.post(
            "/files", files={"file": ("bench.jsonl", records)}, data={"purpose": "batch"}
        ).raise_for_status()
        batch = client.post(
            "/batches",
            json={
                "input_file_id": file.json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ).raise_for_status()
        return str(batch.json()["id"])

    def batch(self, organization: str, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.clients[organization].get(f"/batches/{batch_id}").raise_for_status().json()
        )
        return found

    def wait(self, organization: str, batch_id: str, timeout_s: float = 600) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            found = self.batch(organization, batch_id)
            return found if found["status"] in TERMINAL else None

        found: dict[str, Any] = until(ended, timeout_s, lambda: str(self.batch(organization, batch_id)))
        return found

    def processes(self) -> dict[str, psutil.Process]:
        return {role: psutil.Process(pid) for role, pid in self.stack.connection["pids"].items()}

    def cpu(self) -> dict[str, float]:
        """CPU seconds of every role so far, and of the simulated pool."""
        assert self.simulator.child is not None
        roles = self.processes() | {"simulator": psutil.Process(self.simulator.child.pid)}
        return {role: sum(process.cpu_times()[:2]) for role, process in roles.items()}

    def memory(self) -> dict[str, int]:
        """Peak resident memory of every role, MiB."""
        return {role: peak_mib(process.pid) for role, process in self.processes().items()}


@contextmanager
def rig(*, slots: int = 256, dispatchers: int = 1, latency_ms: float = 0) -> Iterator[Rig]:
    """A fresh stack; two organizations, one model, one pool of `slots` at a simulated server."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        simulator = Simulator(directory, "--latency-ms", str(latency_ms), "--concurrency", "4000")
        simulator.options += ("--call-log", str(simulator.log))
        simulator.start()
        config = {
            "egress": {"allow_cidrs": ["127.0.0.0/8"], "allow_http": True},
            "organizations": [{"id": org, "api_keys": [key]} for org, key in KEYS.items()],
            "models": {
                MODEL: {
                    "input_nano_usd_per_mtok": 150_000_000,
                    "output_nano_usd_per_mtok": 600_000_000,
                    "pools": [{"base_url": simulator.url, "max_concurrency": slots}],
                }
            },
        }
        try:
            with Stack(directory / "stack", config, "--dispatchers", str(dispatchers)) as stack:
                base = stack.connection["base_url"]
                clients = {
                    org: httpx.Client(
                        base_url=base,
                        headers={"Authorization": f"Bearer {key}"},
                        timeout=600,
                        trust_env=False,
                    )
                    for org, key in KEYS.items()
                }
                try:
                    yield Rig(stack, simulator, clients)
                finally:
                    for client in clients.values():
                        client.close()
        finally:
            simulator.stop()


def lines(count: int, label: str = "r", *, size: int = RECORD_BYTES, prompt: str = "ok") -> bytes:
    """A JSONL file of `count` records of about `size` bytes each."""
    made = []
    for i in range(count):
        text = f"{prompt} {label}{i} "
        record = {
            "custom_id": f"{label}{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": text}]},
        }
        padding = size - len(json.dumps(record))
        record["body"]["messages"][0]["content"] += "x" * max(0, padding)  # type: ignore[index]
        made.append(json.dumps(record))
    return ("\n".join(made) + "\n").encode()


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median_of(rounds: int, measure: Callable[[], float]) -> tuple[float, list[float]]:
    """The median, and every round's figure."""
    found = [measure() for _ in range(rounds)]
    return statistics.median(found), found
