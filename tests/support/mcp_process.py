"""Servers of the official MCP SDK, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import httpx

from services.embedded.ports import free_port
from tests.e2e.clients.installed import python_sdk
from tests.support.until import until

SCRIPT = Path(__file__).with_name("mcp_server.py")


class McpServer:
    """A context manager. `sdk` is the SDK's major version; options as the script describes them."""

    def __init__(self, directory: Path, sdk: int, *options: str) -> None:
        self._python = sys.executable if sdk == 2 else str(python_sdk("mcp-1.txt"))
        self._options = options
        self._port = free_port()
        self._log = directory / f"mcp-{self._port}.log"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/mcp"

    def __enter__(self) -> McpServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.said)
        self.stop()

    @property
    def said(self) -> str:
        return self._log.read_text("utf-8", "replace")[-3_000:]

    def start(self) -> None:
        """Start it, on the same port each time, and wait until it answers."""
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [self._python, "-P", str(SCRIPT), str(self._port), *self._options],
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )
        until(self._answers, 60, lambda: self.said)

    def stop(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child.wait(30)

    def _answers(self) -> bool:
        assert self._child is not None
        assert self._child.poll() is None, self.said
        try:
            httpx.get(f"http://127.0.0.1:{self._port}/", timeout=1, trust_env=False)
        except httpx.TransportError:
            return False
        return True
