"""`openrelay up`: everything on one machine, started in order, kept running, stopped in order.

    foundations (broker, warehouse, simulator)  ->  topics and tables  ->  api, control and the stages

The supervisor does no work of its own. Whatever it is killed with, its children end with it; whatever a child
is killed with, it is started again on the same ports. The sockets of the two HTTP hosts are the supervisor's,
so that callers wait, rather than being refused, while nobody serves them. The settings are resolved here
once, environment included, and written to `run/settings.json`, which is all that the roles read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from schemas.settings import Settings
from services import process
from services.embedded import broker
from services.embedded.child import SLOW_S, Child, StartFailed, end_of
from services.embedded.connection import connection, publish
from services.embedded.jars import BrokerMissing
from services.embedded.plan import LISTED, STOP_ORDER, Role, foundations, openrelay, stages
from services.embedded.ports import is_free
from services.embedded.resolve import Ports, Resolved, choose_ports, made, resolve
from services.settings import SettingsError, default_data_dir, is_setting, read_tree, write

STEP_S = 1.5
"""Time that every step of stopping has, however long the ones before took."""
BROKER_STOP_S = 5.0
RESERVE_S = 4.0
"""Of `drain_s`, what is kept for the steps after the longest one."""
LOG_CHECK_S = 30.0
RELOAD_AGAIN_S = 5.0
RELOAD_AGAIN_MOST_S = 60.0
"""Settings that could not be taken are tried again after so long, and twice as long each time, up to this."""


def run(config: Path | None, data: Path | None, *, port: int, control_port: int, dispatchers: int) -> None:
    """Run a stack until SIGTERM or SIGINT; exits 0 then, 1 if it cannot run, 2 for faulty settings."""
    if dispatchers < 1:
        _fail("--dispatchers: at least one is needed", 2)
    for name, wanted in (("--port", port), ("--control-port", control_port)):
        if not 0 <= wanted < 65_536:
            _fail(f"{name}: must be a port from 1 to 65535, or 0 for any", 2)
    if port and port == control_port:
        _fail("--port and --control-port: two hosts need two ports", 2)
    try:
        tree = read_tree(config, os.environ)
        directory = (data or Path(str(tree.get("data_dir") or default_data_dir()))).expanduser().absolute()
        with _alone(directory):
            (directory / "connection.json").unlink(missing_ok=True)
            for name, wanted in (("--port", port), ("--control-port", control_port)):
                if wanted and not is_free(wanted):
                    _fail(f"port {wanted} is taken by another program; choose another with {name}", 1)
            ports = choose_ports(directory, port, control_port)
            resolved = resolve(tree, directory, ports, made(directory))
            listeners = {
                "api": process.listen("127.0.0.1", ports.api),
                "control": process.listen("127.0.0.1", ports.control),
            }
            asyncio.run(Supervisor(config, directory, ports, resolved, dispatchers, listeners).run())
    except SettingsError as error:
        _fail(str(error), 2)
    except (StartFailed, BrokerMissing, broker.BrokerFailed) as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or 'openrelay up'}: {error.strerror}", 1)


class Supervisor:
    """One run of a stack."""

    def __init__(
        self,
        config: Path | None,
        directory: Path,
        ports: Ports,
        resolved: Resolved,
        dispatchers: int,
        listeners: dict[str, socket.socket],
    ) -> None:
        self._config = config
        self._directory = directory
        self._ports = ports
        self._resolved = resolved
        self._dispatchers = dispatchers
        self._listeners = listeners
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._published = False
        self._reloading = asyncio.Event()
        self._reload_again_s = RELOAD_AGAIN_S
        # resolved once: a role that laid the variables over the settings again would undo a reload
        self._environ = {name: value for name, value in os.environ.items() if not is_setting(name)}

    @property
    def _settings_file(self) -> Path:
        return self._directory / "run" / "settings.json"

    @property
    def _connection_file(self) -> Path:
        return self._directory / "connection.json"

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._end)
        loop.add_signal_handler(signal.SIGINT, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reloading.set)
        process.allow_hangup()
        try:
            await self._until_stopped(self._start())
            if not self._stop.is_set():
                self._publish()
                self._announce()
                await self._until_stopped(self._serve())
        finally:
            self._connection_file.unlink(missing_ok=True)
            self._published = False
            await self._shut_down()

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine, or give it up when the stack is told to stop; its failure is raised."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await _first(task, stop)
            if task.done():
                task.result()
        finally:
            for each in (task, stop):
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, StartFailed):
                    await each

    async def _start(self) -> None:
        _say(f"starting in {self._directory}")
        write(_for_roles(self._resolved.settings), self._settings_file)
        started = [self._add(role) for role in foundations(self._resolved, self._ports, self._directory)]
        if self._resolved.kafka:
            command = broker.prepare(
                self._directory / "kafka", self._ports.kafka, self._ports.kafka_controller
            )
            role = Role("kafka", "kafka", tuple(command), self._ports.kafka, broker.explain)
            started.append(self._add(role))
        await self._all_ready(started)
        await self._prepare(self._settings_file)
        roles = stages(self._ports, self._settings_file, self._dispatchers)
        await self._all_ready([self._add(role) for role in roles])

    async def _prepare(self, settings: Path) -> None:
        """Topics and tables, made by a process of its own. Raises StartFailed."""
        log = self._directory / "logs" / "migrate.log"
        log.unlink(missing_ok=True)
        command = openrelay("migrate", "--config", str(settings))
        child, _ = process.spawn(command, log=log, environ=self._environ, ready=False)
        loop = asyncio.get_running_loop()
        slow = loop.call_later(
            SLOW_S, lambda: _say(f"topics and tables are not there after {SLOW_S:g} s; see {log}")
        )
        try:
            await asyncio.to_thread(child.wait)
        finally:
            slow.cancel()
            child.kill()
        if child.returncode != 0:
            why = end_of(log) or f"the process ended with status {child.returncode} and said nothing"
            raise StartFailed(f"topics and tables could not be made:\n{why}")

    def _add(self, role: Role) -> Child:
        listener = self._listeners.get(role.name)
        child = Child(role, self._directory, self._environ, self._publish_again, listener)
        self._children.append(child)
        self._tasks.append(asyncio.create_task(child.run(), name=role.name))
        return child

    async def _all_ready(self, children: list[Child]) -> None:
        """Wait for all of them; the first that fails is the error."""
        everyone = asyncio.ensure_future(asyncio.gather(*(child.ready.wait() for child in children)))
        try:
            await _first(everyone, *self._tasks)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            everyone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await everyone

    async def _serve(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOG_CHECK_S):
                    await self._reloading.wait()
            if self._reloading.is_set():
                self._reloading.clear()
                await self._reload()
            for child in self._children:
                child.limit_log()

    async def _reload(self) -> None:
        """Read the settings again and have the roles take them: at once, or by another process of each.

        Faulty settings are reported and change nothing. So are those that have no topics and tables yet,
        because the broker, the warehouse or the disk does not do it now: these are tried again.
        """
        try:
            tree = read_tree(self._config, os.environ)
            resolved = resolve(tree, self._directory, self._ports, made(self._directory))
        except SettingsError as error:
            _say(f"the settings were not read again:\n{error}")
            return
        if (resolved.kafka, resolved.warehouse) != (self._resolved.kafka, self._resolved.warehouse):
            _say("the settings were not read again: to change broker or warehouse, stop and start")
            return
        coming = self._settings_file.with_suffix(".next.json")
        try:
            write(_for_roles(resolved.settings), coming)
            await self._prepare(coming)
        except (StartFailed, OSError) as error:
            coming.unlink(missing_ok=True)
            again_s, self._reload_again_s = (
                self._reload_again_s,
                min(2 * self._reload_again_s, RELOAD_AGAIN_MOST_S),
            )
            _say(f"the settings were not read again, which is tried once more in {again_s:g} s: {error}")
            asyncio.get_running_loop().call_later(again_s, self._reloading.set)
            return
        self._reload_again_s = RELOAD_AGAIN_S
        os.replace(coming, self._settings_file)
        self._resolved = resolved
        drain_s = resolved.settings.limits.drain_s
        readers = [child for child in self._children if child.role.reads_settings]
        for child in readers:
            if child.role.rereads:
                child.signal(signal.SIGHUP)
        await asyncio.gather(*(child.renew(drain_s) for child in readers if not child.role.rereads))
        self._publish()
        _say("the settings were read again")

    def _publish_again(self) -> None:
        if self._published:
            self._publish()

    def _publish(self) -> None:
        pids = {child.role.name: child.pid for child in self._children if child.role.kind in LISTED}
        publish(self._connection_file, connection(self._resolved.settings, self._ports), pids)
        self._published = True

    def _announce(self) -> None:
        where = connection(self._resolved.settings, self._ports)
        if self._resolved.simulated:
            _say(f"simulated, with made-up answers: {', '.join(self._resolved.simulated)}")
        print(f"ready {where.base_url} (control {where.control_url}, data {self._directory})", flush=True)

    def _reap(self) -> None:
        for child in self._children:
            child.reap()

    def _end(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _shut_down(self) -> None:
        """Step by step within `drain_s`; a second signal ends it at once."""
        for listener in self._listeners.values():
            listener.close()
        deadline = time.monotonic() + self._resolved.settings.limits.drain_s
        for kinds in STOP_ORDER:
            patience = BROKER_STOP_S if kinds == ("kafka",) else STEP_S
            until = max(deadline, time.monotonic() + patience)
            children = [child for child in self._children if child.role.kind in kinds]
            if children:
                await self._hurried(asyncio.gather(*(child.stop(until) for child in children)), children)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hurried(self, stopping: asyncio.Future[list[None]], children: list[Child]) -> None:
        hurry = asyncio.ensure_future(self._hurry.wait())
        await _first(stopping, hurry)
        if not stopping.done():
            for child in children:
                child.signal(signal.SIGKILL)
        hurry.cancel()
        await stopping


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when="FIRST_COMPLETED")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One stack a data directory, for as long as this process lives."""
    file = directory / "run" / "lock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # inputs and logs are in it as they were sent
    file.parent.mkdir(exist_ok=True)
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            _fail(f"{directory} is used by another `openrelay up` (pid {holder}); stop it, or give --data", 1)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _for_roles(settings: Settings) -> Settings:
    """The settings with a shorter drain: each role may use up its own, and all together have `drain_s`."""
    drain_s = settings.limits.drain_s
    limits = msgspec.structs.replace(settings.limits, drain_s=drain_s - min(RESERVE_S, drain_s / 4))
    return msgspec.structs.replace(settings, limits=limits)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(message: str, status: int) -> NoReturn:
    print(f"openrelay: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
