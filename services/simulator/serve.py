"""Starting and stopping the simulated model server."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop

from services.process import listen
from services.simulator.calls import Calls
from services.simulator.model import Options, SimulatedModel
from services.simulator.protocol import Connection


def run(
    host: str,
    port: int,
    *,
    latency_ms: float = 0.0,
    latency_sigma: float = 0.0,
    concurrency: int = 256,
    models: list[str] | None = None,
    seed: int = 0,
    call_log: str | Path | None = None,
    log_bodies: bool = False,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then close every connection and return.

    `latency_ms` is the median of a log-normal latency of spread `latency_sigma` (0: constant);
    `concurrency` calls have a slot, further ones wait. Without `models` every name is served. `call_log`
    gets a line of JSON for each call, appended. `ready` is called once, when the port accepts connections.
    Raises PortTaken if it cannot listen, ValueError for impossible options.
    """
    options = Options(
        latency_ms=latency_ms,
        latency_sigma=latency_sigma,
        concurrency=concurrency,
        log_bodies=log_bodies,
    )
    allow_open_files()
    with ExitStack() as stack:
        log = None if call_log is None else stack.enter_context(open(call_log, "ab"))
        model = SimulatedModel(models or [], options, Calls(log), seed)
        uvloop.run(_serve(host, port, model, ready))


def allow_open_files(wanted: int = 65_536) -> None:
    """Raise this process's limit of open files as far as it may: a connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _serve(host: str, port: int, model: SimulatedModel, ready: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(host, port, model):
        if ready is not None:
            ready()
        await stop.wait()


class serving:
    """A listening server as an async context manager; `port` is the real one when 0 was asked for."""

    def __init__(self, host: str, port: int, model: SimulatedModel) -> None:
        self.host = host
        self.port = port
        self.model = model
        self._connections: set[Connection] = set()

    async def __aenter__(self) -> serving:
        loop = asyncio.get_running_loop()
        listener = listen(self.host, self.port)
        self._server = await loop.create_server(
            lambda: Connection(self.model, self._connections), sock=listener, backlog=4096
        )
        self.port = listener.getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        await self._server.wait_closed()
        self.model.calls.flush()
