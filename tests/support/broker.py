"""An embedded broker of its own for a test session, which tests may kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from services import process
from services.embedded import broker
from services.embedded.ports import free_port

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30


class EmbeddedBroker:
    """A running broker in `directory`; ports and data stay the same from start to start.

    With `far_port`, clients that come in by a second listener, on `listener_port`, are told to find the
    broker on that port: a proxy's, which forwards to it.
    """

    def __init__(self, directory: Path, listener_port: int = 0, far_port: int = 0) -> None:
        self.directory = directory
        self.port = free_port()
        self.controller_port = free_port()
        self._listener_port = listener_port
        self._far_port = far_port
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "kafka.log"

    def start(self) -> None:
        """Start it and wait until it serves."""
        assert self.child is None, "the broker runs already"
        command = broker.prepare(self.directory, self.port, self.controller_port)
        if self._far_port:
            self._listen_twice()
        self.child, _ = process.spawn(command, log=self.log, environ=os.environ, ready=False)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not broker.answers(self.port):
            if self.child.poll() is not None:
                raise AssertionError(broker.explain(self.log.read_text("utf-8")))
            if time.monotonic() > deadline:
                raise AssertionError(f"no broker within {START_TIMEOUT_S} s:\n{self.log.read_text('utf-8')}")
            time.sleep(0.02)

    def _listen_twice(self) -> None:
        values = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},FAR://127.0.0.1:{self._listener_port}"
            f",CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port},FAR://127.0.0.1:{self._far_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,FAR:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        with (self.directory / "server.properties").open("a", encoding="utf-8") as config:
            config.writelines(f"{key}={value}\n" for key, value in values.items())

    def kill(self) -> None:
        """SIGKILL, as a crash would; the data stays."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self.child is not None
        self.child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.child is not None
        self.child.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self.child is None:
            return
        self.child.send_signal(how)
        self.child.send_signal(signal.SIGCONT)
        self.child.wait(STOP_TIMEOUT_S)
        self.child = None
