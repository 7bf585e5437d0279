"""Starting and stopping the control host.

It follows two things: keys, without news of which it refuses to serve on, and batches for the dashboard.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from schemas import topics
from schemas.settings import Settings
from services import exposition
from services.api.principals import Principals
from services.api.protocol import bounded_by
from services.control import board
from services.control.application import application
from services.control.issued import IssuedKeys
from services.process import allow_open_files, inherited_listener, listen
from streams.kafka.follow import Follower

CATCH_UP_S = 60.0
FAILURE_CHECK_S = 1.0


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM."""
    allow_open_files()
    listener = inherited_listener() or listen(host, port)
    exposition.forget_dead(settings)
    issued, batches = IssuedKeys(), board.Board()
    keys = Follower(settings.kafka, "openrelay-control", [topics.KEYS], issued.apply)
    facts = Follower(settings.kafka, "openrelay-control-board", board.TOPICS, batches.apply)
    keys.start()
    facts.start()
    try:
        keys.wait_caught_up(CATCH_UP_S)
        config = uvicorn.Config(
            application(settings, Principals(settings.organizations, issued.find), batches),
            http=bounded_by(settings.http),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.limits.drain_s)),
        )
        asyncio.run(_serve(uvicorn.Server(config), listener, [keys, facts]))
    finally:
        keys.stop()
        facts.stop()


async def _serve(server: uvicorn.Server, listener: socket.socket, followers: list[Follower]) -> None:
    """Serve until told to stop; without news from the log this process is better started again."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not serving.done():
        await asyncio.wait({serving}, timeout=FAILURE_CHECK_S)
        for follower in followers:
            if follower.failure is not None:
                server.should_exit = True
                await serving
                raise follower.failure
    await serving
