"""A whole stack as a user starts it: `openrelay up` in a process of its own, on a directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import tomli_w

from services import process
from tests.support.command import environment, openrelay

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
TAIL_LINES = 25


class Stack:
    """`openrelay up` on `directory` with the settings `config`; a context manager.

    Ports are free ones, and the same again after `restart`. What a test waits for it waits for with
    `until`, which shows the ends of all logs when it gives up.
    """

    def __init__(self, directory: Path, config: dict[str, Any] | None = None, *options: str) -> None:
        self.directory = directory
        self.config = directory / "openrelay.toml"
        self.output = directory / "up.log"
        self._options = options
        self._up: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.configure(config or {})

    def configure(self, config: dict[str, Any]) -> None:
        """Write the settings file; a running stack reads it at SIGHUP."""
        self.config.write_bytes(tomli_w.dumps(config).encode())

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.tails())
        self.close()

    def start(self, **variables: str) -> Stack:
        """Start it and wait for the line that says it is ready."""
        self.launch(**variables)
        self.until(lambda: self.ready_line is not None, "no line that starts with ready", START_TIMEOUT_S)
        return self

    def launch(self, **variables: str) -> None:
        """Start it and do not wait."""
        assert self._up is None, "the stack runs already"
        assert threading.current_thread() is threading.main_thread(), "children end with their thread"
        self.output.unlink(missing_ok=True)
        command = [*openrelay(), "up", "--config", str(self.config), "--data", str(self.directory / "data")]
        if "--port" not in self._options:
            command += ["--port", "0", "--control-port", "0"]
        self._up, _ = process.spawn(
            [*command, *self._options], log=self.output, environ=environment(**variables), ready=False
        )

    @property
    def up(self) -> subprocess.Popen[bytes]:
        """The supervisor's process."""
        assert self._up is not None, "the stack does not run"
        return self._up

    @property
    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text("utf-8", "replace") if self.output.exists() else ""

    @property
    def ready_line(self) -> str | None:
        return next((line for line in self.said.splitlines() if line.startswith("ready")), None)

    @property
    def connection_file(self) -> Path:
        return self.directory / "data" / "connection.json"

    @property
    def connection(self) -> dict[str, Any]:
        """What `connection.json` says now."""
        found: dict[str, Any] = json.loads(self.connection_file.read_text("utf-8"))
        return found

    def pid(self, role: str) -> int:
        return int(self.connection["pids"][role])

    def send(self, role: str, number: signal.Signals) -> int:
        """Signal a role's process; returns its id."""
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def kill(self, role: str, timeout_s: float = 30) -> int:
        """SIGKILL a role and wait until another process has its place; returns the new process's id."""
        old = self.send(role, signal.SIGKILL)
        self.until(lambda: self.pid(role) != old, f"{role} was not started again", timeout_s)
        return self.pid(role)

    def stop(self, role: str) -> int:
        """SIGSTOP: it keeps its connections and does nothing."""
        return self.send(role, signal.SIGSTOP)

    def cont(self, role: str) -> int:
        return self.send(role, signal.SIGCONT)

    def kill_all(self) -> None:
        """SIGKILL the supervisor, and with it everything, at once; what is on disk stays."""
        self.up.kill()
        self._end()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.up.terminate()
        return self._end()

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self._up is not None and self._up.poll() is None:
            self._up.terminate()
            try:
                self._up.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._up.kill()
        if self._up is not None:
            self._end()

    def restart(self) -> Stack:
        self.close()
        return self.start()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.up.pid).children(recursive=True)

    def until(self, condition: Callable[[], bool], otherwise: str, timeout_s: float) -> None:
        """Wait for a condition; fails early when the supervisor has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._up is not None and self._up.poll() is not None and not condition():
                raise AssertionError(
                    f"`openrelay up` ended ({self._up.returncode}): {otherwise}\n{self.tails()}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(f"after {timeout_s} s: {otherwise}\n{self.tails()}")
            time.sleep(0.02)

    def tails(self) -> str:
        """The ends of everything that was said."""
        logs = [self.output, *sorted((self.directory / "data" / "logs").glob("*.log"))]
        parts = []
        for log in logs:
            if log.exists():
                lines = log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:]
                parts.append(f"--- {log.name}\n" + "\n".join(lines))
        return "\n".join(parts)

    def _end(self) -> int:
        status = self.up.wait(STOP_TIMEOUT_S)
        self._up = None
        return status
