"""One role of the stack as a child process that is started again whenever it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services import process
from services.embedded.broker import answers
from services.embedded.plan import Role

READY_TIMEOUT_S = 120
QUICK_S = 10
"""A process that lives shorter than this died quickly."""
KILLS_FORGIVEN = 5
"""Quick deaths in a row by SIGKILL, hence from outside, that are answered at once."""
FAILURES_FORGIVEN = 1
"""The same for a process that ended by itself."""
MAX_DELAY_S = 10.0
LOG_BYTES = 16 * 1024 * 1024
TAIL_LINES = 15
TAIL_CHARACTERS = 65_536
PORT_POLL_S = 0.02


class StartFailed(Exception):
    """The role never came up; the message says what it said."""


def restart_delay_s(quick_deaths: int, killed: bool) -> float:
    """How long to wait before starting again after so many quick deaths in a row."""
    forgiven = KILLS_FORGIVEN if killed else FAILURES_FORGIVEN
    if quick_deaths <= forgiven:
        return 0.0
    return min(MAX_DELAY_S, 0.5 * 2.0 ** (quick_deaths - forgiven - 1))


class Child:
    """Keeps one role running. All methods belong to the main thread's event loop.

    `on_start` is called whenever there is a new process, before it is ready.
    """

    def __init__(
        self, role: Role, directory: Path, environ: Mapping[str, str], on_start: Callable[[], None]
    ) -> None:
        self.role = role
        self.log = directory / "logs" / f"{role.name}.log"
        self.ready = asyncio.Event()
        self.pid = 0
        self._directory = directory
        self._environ = environ
        self._on_start = on_start
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._exited = asyncio.Event()
        self._stopping = False
        self._renewing = False
        self._timed_out = False

    async def run(self) -> None:
        """Start it and start it again until `stop`; raises StartFailed if it never becomes ready."""
        quick_deaths = 0
        while True:
            began = time.monotonic()
            self._spawn()
            served = await self._serve()
            if self._stopped():
                return
            status = self._status()
            if self._renewing:
                self._renewing = False
                continue
            killed = status == -signal.SIGKILL
            if not self.ready.is_set() and not served and (self._timed_out or not killed):
                raise StartFailed(self._explanation(f"{self.role.name} did not start:\n{self._tail()}"))
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_S else 0
            delay_s = restart_delay_s(quick_deaths, killed)
            self._say_died(status, delay_s)
            await asyncio.sleep(delay_s)
            if self._stopped():
                return

    async def _serve(self) -> bool:
        """Wait until the process has ended; whether it was ready before."""
        exited = asyncio.ensure_future(self._exited.wait())
        ready = asyncio.ensure_future(self._await_ready())
        try:
            await asyncio.wait({exited, ready}, timeout=READY_TIMEOUT_S, return_when="FIRST_COMPLETED")
            served = ready.done() and not ready.cancelled() and ready.result()
            if served:
                self.ready.set()
            elif not exited.done():
                _say(f"{self.role.name} was not ready within {READY_TIMEOUT_S} s")
                self._timed_out = True
                self.signal(signal.SIGKILL)
            await exited
            return served
        finally:
            ready.cancel()
            exited.cancel()

    def _spawn(self) -> None:
        self._exited.clear()
        self._rotate()
        self._process, self._pipe = process.spawn(
            self.role.command,
            log=self.log,
            environ=self._environ,
            ready=self.role.port is None,
            cwd=self._directory / "run",
        )
        self.pid = self._process.pid
        self._on_start()

    async def _await_ready(self) -> bool:
        if self.role.port is not None:
            while not answers(self.role.port):  # noqa: ASYNC110 - a program that cannot tell us
                await asyncio.sleep(PORT_POLL_S)
            return True
        assert self._pipe is not None
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._pipe, readable.set)
        try:
            await readable.wait()
            return os.read(self._pipe, 64) != b""
        finally:
            loop.remove_reader(self._pipe)
            os.close(self._pipe)

    def reap(self) -> None:
        """Notice whether the process has ended; called after SIGCHLD."""
        if self._process is not None and self._process.poll() is not None:
            self._exited.set()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)

    async def renew(self, deadline: float) -> None:
        """Have another process in its place, which reads its settings anew; this one may drain first."""
        self._renewing = self.running
        await self._end(deadline)

    async def stop(self, deadline: float) -> None:
        """SIGTERM, and SIGKILL at the deadline (monotonic). Returns when it has ended."""
        self._stopping = True
        await self._end(deadline)

    async def _end(self, deadline: float) -> None:
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._ended()
        except TimeoutError:
            _say(f"{self.role.name} did not stop in time and was killed")
            self.signal(signal.SIGKILL)
            await self._ended()

    async def _ended(self) -> None:
        if self.running:
            await self._exited.wait()

    def _tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        text = self.log.read_text("utf-8", "replace")[-TAIL_CHARACTERS:]
        return "\n".join(text.splitlines()[-lines:])

    def _explanation(self, otherwise: str) -> str:
        if self.role.explain is None:
            return otherwise
        return self.role.explain(self._tail(TAIL_CHARACTERS))

    def limit_log(self) -> None:
        """Move a log that has grown large aside, while the process keeps writing to it."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.with_suffix(".log.1").write_bytes(self.log.read_bytes())
            os.truncate(self.log, 0)

    def _rotate(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            os.replace(self.log, self.log.with_suffix(".log.1"))

    def _stopped(self) -> bool:
        return self._stopping

    def _status(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def _say_died(self, status: int, delay_s: float) -> None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        when = f"in {delay_s:g} s" if delay_s else "now"
        _say(f"{self.role.name} (pid {self.pid}) {how}; starting it again {when}")
        if status != -signal.SIGKILL:
            said = self._explanation(self._tail())
            for line in said.splitlines():
                _say(f"  {self.role.name} | {line}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
