"""A simulated model server of its own for a test session, with its log of calls."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from services import process
from services.embedded.ports import free_port
from tests.support.command import environment, openrelay
from tests.support.until import until


class Simulator:
    """`openrelay simulate` on a port that stays the same from start to start; a context in which it runs."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.port = free_port()
        self.options = options
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Simulator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def start(self) -> None:
        log = self.directory / f"simulator-{self.port}.log"
        self.child, _ = process.spawn(
            [*openrelay(), "simulate", "--port", str(self.port), *self.options],
            log=log,
            environ=environment(),
            ready=False,
        )
        until(self._answers, 30, lambda: log.read_text("utf-8"))

    def kill(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self.child = None

    def stop(self) -> None:
        if self.child is not None:
            self.child.terminate()
            self.child.wait(timeout=30)
            self.child = None

    def control(self, **changes: Any) -> None:
        """Change what it does from now on: `latency_ms`, `concurrency`, `healthy`, `status`, …"""
        httpx.post(f"{self.root}/control", json=changes).raise_for_status()

    def calls(self) -> dict[str, Any]:
        """Counts of calls, in all and by prompt."""
        found: dict[str, Any] = httpx.get(f"{self.root}/calls", timeout=30).raise_for_status().json()
        return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.root}/stats").raise_for_status().json()
        return found

    def logged(self, since: float) -> list[dict[str, Any]]:
        """Calls that arrived at Unix time `since` or later; needs the option `--call-log` of `log`."""
        lines = self.log.read_text("utf-8").splitlines()
        return [call for call in map(json.loads, lines) if call["t_arrived"] >= since]

    @property
    def log(self) -> Path:
        return self.directory / f"calls-{self.port}.jsonl"

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.root}/stats", timeout=1).status_code == 200
        except httpx.TransportError:
            return False
