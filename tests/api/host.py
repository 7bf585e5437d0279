"""The real API process over a real broker, and what tests do to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from schemas.settings import Settings
from services import process
from services.embedded.ports import free_port

START_S = 60.0
_COMMAND = (sys.executable, "-P", "-m", "services.cli.openrelay", "api")
CHAT = "/v1/chat/completions"
ACME, RIVAL, IDLE = "or_test_acme_00000000", "vl_test_rival_0000000", "or_test_idle_00000000"


class Host:
    """One API process in `directory`; it keeps its port from start to start."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.settings = settings
        self.port = free_port()
        self.child: subprocess.Popen[bytes] | None = None
        self.expected: set[str] = set()
        """Parts of log lines of level error that the test provokes."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "api.log"

    def start(self, **environ: str) -> Host:
        config = self.directory / "settings.json"
        config.write_bytes(msgspec.json.encode(self.settings))
        self.child, ready = process.spawn(
            [*_COMMAND, "--config", str(config), "--port", str(self.port)],
            log=self.log,
            environ=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environ,
        )
        assert ready is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                said = os.read(ready, 100)
            except BlockingIOError:
                said = None
            if said:
                break
            if said == b"" or time.monotonic() > deadline:
                raise AssertionError(f"the API did not start:\n{self.log.read_text('utf-8')[-8000:]}")
            time.sleep(0.01)
        os.close(ready)
        return self

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> int:
        if self.child is None:
            return 0
        self.child.send_signal(how)
        status = self.child.wait(60)
        self.child = None
        return status

    def check_log(self) -> None:
        """No error was logged but those a test expects."""
        if not self.log.exists():
            return
        for line in self.log.read_text("utf-8").splitlines():
            level = json.loads(line).get("level") if line.startswith("{") else "error"
            if level in ("error", "critical") and not any(part in line for part in self.expected):
                raise AssertionError(f"the API logged an error: {line[:4000]}")

    def client(self, key: str | None = ACME, **headers: str) -> httpx.Client:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)


def record(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body,
    }


def jsonl(records: Iterable[Any]) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in records
    )


def upload(client: httpx.Client, content: bytes, name: str = "x.jsonl", **fields: str) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"} | fields, files={"file": (name, content)})


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, checked for its shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert response.headers["x-request-id"].startswith("req_")
    found: dict[str, Any] = body["error"]
    return found
