"""One role of the stack as a child process that is started again whenever it ends.

A role whose socket is the supervisor's can be replaced: another process serves before the old one drains.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from services import process
from services.embedded.broker import answers
from services.embedded.plan import Role

READY_TIMEOUT_S = 120
SLOW_S = 10.0
"""A start that takes longer is explained by the end of its log, and again each time that this has doubled."""
QUICK_S = 10
"""A process that lives shorter than this died quickly."""
KILLS_FORGIVEN = 5
"""Quick deaths in a row by SIGKILL, hence from outside, that are answered at once."""
FAILURES_FORGIVEN = 1
"""The same for a process that ended by itself."""
MAX_DELAY_S = 10.0
LOG_BYTES = 16 * 1024 * 1024
TAIL_LINES = 15
SLOW_TAIL_LINES = 3
TAIL_CHARACTERS = 65_536
PORT_POLL_S = 0.02
LEAST_FREE_BYTES = 1024 * 1024
"""With less, a log that is empty is so because nothing could be written."""


class StartFailed(Exception):
    """The role never came up; the message says what it said."""


def restart_delay_s(quick_deaths: int, killed: bool) -> float:
    """How long to wait before starting again after so many quick deaths in a row."""
    forgiven = KILLS_FORGIVEN if killed else FAILURES_FORGIVEN
    if quick_deaths <= forgiven:
        return 0.0
    return min(MAX_DELAY_S, 0.5 * 2.0 ** (quick_deaths - forgiven - 1))


def end_of(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; of one that says nothing, why."""
    text = log.read_text("utf-8", "replace")[-TAIL_CHARACTERS:] if log.exists() else ""
    if text.strip():
        return "\n".join(text.splitlines()[-lines:])
    if shutil.disk_usage(log.parent).free < LEAST_FREE_BYTES:
        return (
            f"{os.strerror(errno.ENOSPC)}: the disk of {log.parent} is full; free some space and start again"
        )
    return ""


class _Running:
    """One process of a role, from its start to its end."""

    def __init__(self, started: subprocess.Popen[bytes], pipe: int | None) -> None:
        self.process = started
        self.began = time.monotonic()
        self.exited = asyncio.Event()
        self.served = False
        """Whether it has become ready."""
        self.timed_out = False
        self._pipe = pipe

    def ended(self) -> bool:
        """Whether it has; whoever finds out tells all that wait, for SIGCHLD comes but once."""
        if self.process.poll() is None:
            return False
        self.exited.set()
        return True

    def signal(self, number: signal.Signals) -> None:
        if not self.ended():
            self.process.send_signal(number)

    async def wait(self) -> None:
        """Until it has ended."""
        if not self.ended():
            await self.exited.wait()

    async def await_ready(self, port: int | None) -> bool:
        """True when it serves, False when it died before."""
        if port is not None:
            while not answers(port):  # noqa: ASYNC110 - a program that cannot tell us
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


class Child:
    """Keeps one role running. All methods belong to the main thread's event loop.

    `on_start` is called whenever another process has the role, before it is ready unless it replaces one.
    """

    def __init__(
        self,
        role: Role,
        directory: Path,
        environ: Mapping[str, str],
        on_start: Callable[[], None],
        listener: socket.socket | None = None,
    ) -> None:
        self.role = role
        self.log = directory / "logs" / f"{role.name}.log"
        self.ready = asyncio.Event()
        self.replaceable = listener is not None
        self._directory = directory
        self._environ = environ
        self._on_start = on_start
        self._listener = listener
        self._current: _Running | None = None
        self._leaving: set[_Running] = set()
        """Processes beside the current one: on their way in or out."""
        self._stopping = False
        self._renewing = False

    @property
    def pid(self) -> int:
        return 0 if self._current is None else self._current.process.pid

    async def run(self) -> None:
        """Start it and start it again until `stop`; raises StartFailed if it never becomes ready."""
        quick_deaths = 0
        current = self._start()
        while True:
            await self._serve(current)
            await current.wait()
            if self._stopped():
                return
            if (successor := self._successor(current)) is not None:
                current = successor
                continue
            status = current.process.wait()
            if self._renewing:
                self._renewing = False
                current = self._start()
                continue
            killed = status == -signal.SIGKILL
            if not self.ready.is_set() and not current.served and (current.timed_out or not killed):
                raise StartFailed(self._explanation(f"{self.role.name} did not start:\n{self._tail()}"))
            quick_deaths = quick_deaths + 1 if time.monotonic() - current.began < QUICK_S else 0
            delay_s = restart_delay_s(quick_deaths, killed)
            self._say_died(current, status, delay_s)
            await asyncio.sleep(delay_s)
            if self._stopped():
                return
            current = self._successor(current) or self._start()

    async def _serve(self, running: _Running) -> None:
        """Wait until the process is ready; if it takes too long, end it."""
        if running.served:
            return
        exited = asyncio.ensure_future(running.wait())
        ready = asyncio.ensure_future(running.await_ready(self.role.port))
        explaining = asyncio.ensure_future(self._explain_slowness())
        try:
            await asyncio.wait({exited, ready}, timeout=READY_TIMEOUT_S, return_when="FIRST_COMPLETED")
            running.served = ready.done() and ready.result()
            if running.served:
                self.ready.set()
            elif not exited.done() and not ready.done():
                _say(f"{self.role.name} was not ready within {READY_TIMEOUT_S} s")
                running.timed_out = True
                running.signal(signal.SIGKILL)
        finally:
            for each in (ready, exited, explaining):
                each.cancel()

    async def _explain_slowness(self) -> None:
        waited_s, pause_s = 0.0, SLOW_S
        while True:
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = waited_s
            _say(f"{self.role.name} is not ready after {waited_s:g} s; the end of {self.log}:")
            self._quote(self._tail(SLOW_TAIL_LINES))

    def _start(self) -> _Running:
        self._current = self._spawn()
        self._on_start()
        return self._current

    def _spawn(self) -> _Running:
        self._rotate()
        started, pipe = process.spawn(
            self.role.command,
            log=self.log,
            environ=self._environ,
            ready=self.role.port is None,
            cwd=self._directory / "run",
            listener=self._listener,
        )
        return _Running(started, pipe)

    def _successor(self, running: _Running) -> _Running | None:
        """The process that has the role now, if it is another one."""
        return None if self._current is running else self._current

    def reap(self) -> None:
        """Notice which processes have ended; called after SIGCHLD."""
        for running in self._all():
            running.ended()

    def signal(self, number: signal.Signals) -> None:
        if self._current is not None:
            self._current.signal(number)

    async def renew(self, drain_s: float) -> None:
        """Have another process in its place, which reads its settings anew.

        Where the socket is ours, it serves before this one drains; if it cannot, this one stays.
        """
        if not self.replaceable:
            assert self._current is not None
            self._renewing = not self._current.ended()
            await self._end(self._current, time.monotonic() + drain_s)
            return
        fresh = self._spawn()
        self._leaving.add(fresh)
        await self._serve(fresh)
        if not fresh.served:
            await fresh.wait()
            self._leaving.discard(fresh)
            _say(f"{self.role.name} goes on as it was; another one did not start:\n{self._tail()}")
            return
        old, self._current = self._current, fresh
        self._leaving.discard(fresh)
        self._on_start()
        if old is not None:
            self._leaving.add(old)
            await self._end(old, time.monotonic() + drain_s)
            self._leaving.discard(old)

    async def stop(self, deadline: float) -> None:
        """SIGTERM, and SIGKILL at the deadline (monotonic). Returns when it has ended."""
        self._stopping = True
        await asyncio.gather(*(self._end(running, deadline) for running in self._all()))

    async def _end(self, running: _Running, deadline: float) -> None:
        running.signal(signal.SIGTERM)
        running.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await running.wait()
        except TimeoutError:
            _say(f"{self.role.name} did not stop in time and was killed")
            running.signal(signal.SIGKILL)
            await running.wait()

    def _all(self) -> list[_Running]:
        return [*self._leaving, *([] if self._current is None else [self._current])]

    def _tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        return end_of(self.log, lines)

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

    def _say_died(self, running: _Running, status: int, delay_s: float) -> None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        when = f"in {delay_s:g} s" if delay_s else "now"
        _say(f"{self.role.name} (pid {running.process.pid}) {how}; starting it again {when}")
        if status != -signal.SIGKILL:
            said = self._explanation(self._tail())
            self._quote(said)

    def _quote(self, said: str) -> None:
        for line in said.splitlines():
            _say(f"  {self.role.name} | {line}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
