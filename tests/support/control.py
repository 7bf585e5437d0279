"""`openrelay control` as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec

from schemas.settings import Settings
from services import process
from services.embedded.ports import free_port
from tests.support.command import environment, openrelay


class ControlHost:
    def __init__(self, directory: Path, settings: Settings) -> None:
        self.directory = directory
        self.settings = settings
        self.port = free_port()
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "control.log"

    def start(self) -> None:
        """Start it and wait until it says that it serves."""
        config = self.directory / "control.json"
        config.write_bytes(msgspec.json.encode(self.settings))
        self.child, pipe = process.spawn(
            [*openrelay(), "control", "--config", str(config), "--port", str(self.port)],
            log=self.log,
            environ=environment(),
        )
        assert pipe is not None
        os.set_blocking(pipe, True)
        with os.fdopen(pipe, "rb") as reading:
            assert reading.readline() == b"ready\n", self.log.read_text("utf-8")[-4000:]

    def stop(self) -> int:
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(30)
        self.child = None
        return status
