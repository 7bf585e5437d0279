"""A stack, batches for it, and a client that outlives its processes."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import httpx

from tests.support.pipeline import record
from tests.support.simulator import Simulator
from tests.support.stack import Stack
from tests.support.until import until

MODEL = "openrelay/gpt-oss-120b"
KEY = "or_kills_0123456789abcdef"
SLOTS = 20


def settings(simulator: Simulator, **limits: Any) -> dict[str, Any]:
    return {
        "organizations": [{"id": "org_kills", "api_keys": [KEY], "features": ["batch"]}],
        "limits": {"retry_backoff_s": 0.1, **limits},
        "models": {
            MODEL: {
                "input_nano_usd_per_mtok": 150_000_000,
                "cached_input_nano_usd_per_mtok": 75_000_000,
                "output_nano_usd_per_mtok": 600_000_000,
                "pools": [{"base_url": simulator.url, "max_concurrency": SLOTS}],
            }
        },
    }


class Client:
    """The HTTP API as a patient script sees it: it asks again while a process is being replaced.

    A context manager.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._http = httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False)
        self.polls: list[dict[str, Any]] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str) -> httpx.Response:
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = self._http.get(f"{self._stack.connection['base_url']}{path}")
                if answer.status_code != 503:
                    return answer.raise_for_status()
            except (httpx.TransportError, OSError, json.JSONDecodeError):
                pass
            assert time.monotonic() < deadline, f"no answer to {path}\n{self._stack.tails()}"
            time.sleep(0.05)

    def create(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self._http.post(
            f"{self._stack.connection['base_url']}/batches",
            json={"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": records},
        )
        assert answer.status_code == 200, answer.text
        created: dict[str, Any] = answer.json()
        return created

    def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/batches/{batch_id}").json()
        self.polls.append(found)
        return found

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.get(f"/files/{file_id}/content").content.splitlines()]

    def wait(self, batch_id: str, timeout_s: float = 180) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            found = self.batch(batch_id)
            return found if found["status"] in ("completed", "failed", "expired", "cancelled") else None

        ended_batch: dict[str, Any] = until(
            ended, timeout_s, lambda: f"{self.polls[-1]}\n{self._stack.tails()}"
        )
        return ended_batch

    def check(self, batch: dict[str, Any], custom_ids: list[str]) -> None:
        """Counts, lines and the three sums; and no earlier read showed more."""
        output, error = self.lines(batch["output_file_id"]), self.lines(batch["error_file_id"])
        counts = batch["request_counts"]
        assert counts["total"] == counts["completed"] + counts["failed"] == len(custom_ids)
        assert (len(output), len(error)) == (counts["completed"], counts["failed"])
        assert Counter(line["custom_id"] for line in [*output, *error]) == Counter(custom_ids)
        usages = [line["response"]["body"]["usage"] for line in output]
        file_sum = [sum(u[name] for u in usages) for name in ("prompt_tokens", "completion_tokens")]
        usage = batch["usage"]
        assert file_sum == [usage["input_tokens"], usage["output_tokens"]]
        until(
            lambda: (
                self.warehouse(batch["id"])
                == [len(output), usage["input_tokens"], usage["output_tokens"], usage["cost_nano_usd"]]
            ),
            60,
            lambda: f"ClickHouse has {self.warehouse(batch['id'])}, the batch {usage}\n{self._stack.tails()}",
        )
        for before, after in zip(self.polls, self.polls[1:], strict=False):
            for name in ("total", "completed", "failed"):
                assert before["request_counts"][name] <= after["request_counts"][name]
            assert before["usage"]["cost_nano_usd"] <= after["usage"]["cost_nano_usd"]

    def warehouse(self, batch_id: str) -> list[int]:
        query = (
            "SELECT count(), sum(input_tokens), sum(output_tokens), sum(cost_nano_usd) FROM billing.usage"
            " WHERE batch_id = {batch:String} FORMAT JSONCompactEachRow"
        )
        try:
            answer = self._http.get(
                self._stack.connection["clickhouse_url"], params={"query": query, "param_batch": batch_id}
            )
        except (httpx.TransportError, OSError):
            return []
        return [int(value) for value in json.loads(answer.text)] if answer.status_code == 200 else []


def records(label: str, count: int) -> list[dict[str, Any]]:
    return [record(f"{label}{i}", f"ok {label} {i}", MODEL) for i in range(count)]
