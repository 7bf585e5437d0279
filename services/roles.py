"""Turning settings into the stages: one blocking function a role, which returns on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import structlog
import uvloop

from schemas.settings import Settings
from services.process import allow_hangup, allow_open_files, signal_ready
from services.settings import SettingsError
from streams.blobs.stores import open_blobs

GARBAGE_EVERY = 50_000
"""Objects made and kept until the dispatcher looks for cycles among the young ones."""

log = structlog.get_logger("openrelay.roles")


def dispatch(settings: Settings, slot: int, reread: Callable[[], Settings]) -> None:
    """`reread` is called at SIGHUP, for endpoints that appear and vanish while calls run."""
    from streams.dispatch.dispatcher import Dispatcher

    allow_open_files()

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        dispatcher = Dispatcher(settings, _instance("dispatch", slot), open_blobs(settings.storage))

        def configure() -> None:
            try:
                dispatcher.configure(reread())
            except SettingsError as error:
                log.error("settings were not read again", error=str(error))

        loop.add_signal_handler(signal.SIGHUP, configure)
        allow_hangup()
        _collect_seldom()
        await dispatcher.run(stopping, signal_ready)

    uvloop.run(main())


def settle(settings: Settings, slot: int) -> None:
    from streams.settle import Settler

    Settler(settings, _instance("settle", slot)).run(_stopping(), signal_ready)


def sink(settings: Settings, slot: int) -> None:
    from streams.sink import Sink

    blobs = open_blobs(settings.storage)
    Sink(settings, _instance("sink", slot), blobs).run(_stopping(), signal_ready)


def meter(settings: Settings, slot: int) -> None:
    import faust

    from streams.meter import Insert, build

    def open_insert() -> Insert:
        from services.warehouse.client import connect

        client = connect(settings.clickhouse)

        def insert(table: str, columns: list[str], rows: list[list[Any]]) -> None:
            client.insert(table, rows, column_names=columns, settings={"async_insert": 0})

        return insert

    app = build(settings, _instance("meter", slot), open_insert, signal_ready)
    worker = faust.Worker(app, loglevel=None, override_logging=False, redirect_stdouts=False, quiet=True)
    worker.execute_from_commandline()


def _collect_seldom() -> None:
    """Calls make few cycles; looking for them as often as usual keeps slots empty for milliseconds at a time.

    What is there now stays for as long as the process and is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_EVERY, 20, 100)


def _instance(role: str, slot: int) -> str:
    """Static member id: the same process started again gets its partitions back at once."""
    return f"{role}-{slot + 1}"


def _stopping() -> threading.Event:
    """Set by SIGTERM and SIGINT. For the main thread."""
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping
