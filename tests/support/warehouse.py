"""An embedded warehouse of its own for a test session, which tests may kill and start again."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import clickhouse_connect

from services import process
from services.embedded.ports import free_port
from tests.support.command import environment, openrelay

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30


class EmbeddedWarehouse:
    """A running warehouse in `directory`; its port and data stay the same from start to start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        return clickhouse_connect.get_client(dsn=self.url, autogenerate_session_id=False)

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self.child is None, "the warehouse runs already"
        log = self.directory / "warehouse.log"
        self.child, _ = process.spawn(
            [*openrelay(), "warehouse", "--data", str(self.directory / "data"), "--port", str(self.port)],
            log=log,
            environ=environment(),
            ready=False,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the warehouse did not start:\n{log.read_text('utf-8')}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as a crash would; the data stays."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ping", timeout=1) as answer:
                return bool(answer.read() == b"Ok.\n")
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        if self.child is None:
            return
        self.child.send_signal(how)
        self.child.wait(STOP_TIMEOUT_S)
        self.child = None
