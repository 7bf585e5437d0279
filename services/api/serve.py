"""Starting and stopping an API process.

On a socket of its own it answers from the start, with 503 until it knows enough. On its supervisor's, callers
wait meanwhile; and there may be a predecessor that still drains, which has the intake until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from schemas.settings import Settings
from services.api import app
from services.api.creation import Creation
from services.api.parts import Parts
from services.api.presign import Signer
from services.api.protocol import bounded_by
from services.api.readmodel import ReadModel
from services.api.sweeper import Sweeper
from services.api.threads import StorageThreads
from services.api.turn import Turn
from services.api.uploads import Uploads
from services.api.uses import Uses
from services.api.validation import Validation
from services.api.writing import FactWriter
from services.process import CannotStart, allow_open_files, inherited_listener, listen, signal_ready
from streams.blobs import PutUrls, open_blobs
from streams.intake import Intake
from streams.kafka.producer import AsyncProducer

WATCH_EVERY_S = 0.5
KEEP_ALIVE_S = 65
"""Longer than clients keep idle connections, so that they do not send into one that is just being closed."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger("openrelay.api")


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises what ended the read model or intake: the process is to be started again.
    """
    allow_open_files()
    inherited = inherited_listener()
    listener = inherited or listen(host, port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listener, succeeds=inherited is not None))
    finally:
        listener.close()


def _put_urls(settings: Settings) -> PutUrls | None:
    """What signs URLs of the bucket, if they are wanted. Raises CannotStart without anything to sign with."""
    if settings.storage.presigned_puts == "api":
        return None
    try:
        return PutUrls(settings.storage)
    except ValueError as error:
        raise CannotStart(str(error)) from error


async def _serve(settings: Settings, listener: socket.socket, *, succeeds: bool) -> None:
    """With `succeeds` this process takes the place of another, which may not have ended yet."""
    blobs = open_blobs(settings.storage)
    model = ReadModel(settings.kafka, Path(settings.data_dir) / "api")
    producer = AsyncProducer(settings.kafka, "api")
    threads = StorageThreads()
    facts = FactWriter(producer)
    parts = Parts(
        settings=settings,
        blobs=blobs,
        threads=threads,
        model=model,
        facts=facts,
        uploads=Uploads(blobs, threads, facts, settings.limits),
        uses=Uses(model, facts),
        signer=Signer(settings.secrets),
        put_urls=_put_urls(settings),
        validation=Validation(settings.storage),
    )
    creation = Creation(parts)
    number = 0 if succeeds else model.slot
    turn = Turn(Path(settings.data_dir) / "api" / f"intake-{number}.lock")
    intake = Intake(settings, blobs, _instance(settings, number))
    laying_out = False
    sweeper = Sweeper(blobs, model.path, model.catch_up)
    server = Server(
        uvicorn.Config(
            app.build(parts, creation),
            http=bounded_by(settings.http),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.limits.drain_s)),
        )
    )

    async def prepare() -> None:
        nonlocal laying_out
        if not model.ready:
            await asyncio.to_thread(model.start)
        if turn.take():
            await asyncio.to_thread(intake.start)
            laying_out = True
        sweeper.start()
        await server.listening.wait()
        signal_ready()
        while (failure := model.failure or intake.failure) is None:
            await asyncio.sleep(WATCH_EVERY_S)
            if not laying_out and turn.take():
                await asyncio.to_thread(intake.start)
                laying_out = True
        raise failure

    if succeeds:
        await asyncio.to_thread(model.start)
    preparing = asyncio.create_task(prepare())
    preparing.add_done_callback(lambda _: server.stop())
    try:
        await server.serve(sockets=[listener])
        if preparing.done():
            preparing.result()
    finally:
        preparing.cancel()
        await creation.close()
        sweeper.stop()
        if laying_out:
            await asyncio.to_thread(intake.stop)
        turn.give_back()
        parts.validation.close()
        threads.close()
        await producer.close()
        await asyncio.to_thread(model.stop)


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal, and leave it at that: stopping when told to is no failure.

        After SIGHUP the supervisor starts the process again, with the settings as they are then.
        """
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in STOPPING:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        self.should_exit = True


def _instance(settings: Settings, number: int) -> str:
    """A name no other API process has, and that this one has again when it is started anew."""
    place = hashlib.sha256(str(Path(settings.data_dir).resolve()).encode()).hexdigest()[:8]
    return f"api-{socket.gethostname()}-{place}-{number}"
