"""Servers that send more than they were asked for: no answer reaches another call than its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import uvloop
from structlog.testing import capture_logs

from schemas.settings import Egress as EgressSettings
from schemas.settings import Pool
from streams import connections
from streams.connections import Connector
from streams.core.judge import Reply
from streams.pools.endpoint import Endpoint
from streams.pools.openai import OpenAIClient
from streams.tools.egress import Egress
from tests.support.certificate import certificate
from tests.support.until import SLACK_S, until

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LATER_S = 0.02


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def together(body: bytes) -> list[bytes | float]:
    return [whole(body) + whole(b"stale " + body)]


def with_the_body(body: bytes) -> list[bytes | float]:
    head, _, rest = whole(body).partition(b"\r\n\r\n")
    return [head + b"\r\n\r\n", 0.0, rest + whole(b"stale " + body)]


def at_once(body: bytes) -> list[bytes | float]:
    return [whole(body), 0.0, whole(b"stale " + body)]


def later(body: bytes) -> list[bytes | float]:
    return [whole(body), LATER_S, whole(b"stale " + body)]


def half_of_one(body: bytes) -> list[bytes | float]:
    return [whole(body), LATER_S, whole(b"stale " + body)[:30]]


def honest(body: bytes) -> list[bytes | float]:
    return [whole(body)]


Says = Callable[[bytes], list[bytes | float]]


class Server:
    """Answers every request of a connection with its own body, as `says` has it."""

    def __init__(self, says: Says) -> None:
        self._says = says
        self.connections = 0
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split()[0])
                for piece in self._says(await reader.readexactly(length)):
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                    else:
                        await asyncio.sleep(piece)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client closed it
        finally:
            writer.transport.abort()


class Client(NamedTuple):
    ask: Callable[[bytes], Coroutine[Any, Any, bytes]]
    port: int


@contextlib.asynccontextmanager
async def pool_client(server: Server) -> AsyncIterator[Client]:
    client = OpenAIClient()
    endpoint = Endpoint("m", Pool(base_url=f"http://user:secret@127.0.0.1:{server.port}/v1"))

    async def ask(body: bytes) -> bytes:
        outcome = await client.call(endpoint, "/v1/completions", body, timeout_s=20)
        assert isinstance(outcome, Reply)
        return outcome.body

    try:
        yield Client(ask, server.port)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def egress_client(server: Server) -> AsyncIterator[Client]:
    egress = Egress(EgressSettings(allow_cidrs=("127.0.0.0/8",), allow_http=True))

    async def ask(body: bytes) -> bytes:
        _, answer = await egress.post(f"http://127.0.0.1:{server.port}/", body, headers={}, timeout_s=20)
        return answer

    try:
        yield Client(ask, server.port)
    finally:
        await egress.close()


async def ask_until(ask: Callable[[bytes], Coroutine[Any, Any, bytes]], done: Callable[[], object]) -> None:
    """Call again and again, three at a time, each getting its own answer; fails when it is never done."""
    count = 0
    async with asyncio.timeout(SLACK_S):
        while not done():
            bodies = [b"%d" % number for number in range(count, count + 3)]
            assert await asyncio.gather(*map(ask, bodies)) == bodies
            count += 3


@pytest.mark.parametrize("client_of", [pool_client, egress_client])
@pytest.mark.parametrize("says", [together, with_the_body, at_once, later, half_of_one])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_call_gets_its_own_answer(loop: str, says: Says, client_of: Any) -> None:
    """Whatever else the server sends on a connection, at once or a moment later."""

    async def scenario() -> None:
        async with Server(says).serving() as server, client_of(server) as client:
            deadline = asyncio.get_running_loop().time() + 5 * connections.REST_S
            await ask_until(client.ask, lambda: asyncio.get_running_loop().time() > deadline)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(scenario())


async def test_such_a_server_is_named_once_and_gets_a_connection_for_each_call() -> None:
    async with Server(later).serving() as server, pool_client(server) as client:
        with capture_logs() as logs:
            await ask_until(client.ask, lambda: logs)
            before = server.connections
            for number in range(10):
                assert await client.ask(b"%d" % number) == b"%d" % number
            deadline = asyncio.get_running_loop().time() + 3 * connections.REST_S
            await ask_until(client.ask, lambda: asyncio.get_running_loop().time() > deadline)
    assert server.connections >= before + 10
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["endpoint"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("client_of", [pool_client, egress_client])
async def test_connections_of_an_honest_server_are_used_again(client_of: Any) -> None:
    async with Server(honest).serving() as server, client_of(server) as client:
        calls = 0

        async def ask(body: bytes) -> bytes:
            nonlocal calls
            calls += 1
            return await client.ask(body)

        with capture_logs() as logs:
            await ask_until(ask, lambda: calls > 2 * server.connections)
        assert logs == []


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_loop_has_not_read_yet_counts(
    loop: str, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends a second answer while this thread is busy with something else."""
    monkeypatch.setattr(connections, "REST_S", 0.0)
    authority = certificate(tmp_path / "pair.pem", "pool.example")
    trusted = ssl.create_default_context(cadata=authority.decode())
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(tmp_path / "pair.pem")
    more, sent = threading.Event(), threading.Event()
    said: list[str] = []

    def serve(listener: socket.socket) -> None:
        for body in (b"first", b"second"):
            accepted, _ = listener.accept()
            with server_tls.wrap_socket(accepted, server_side=True) if tls else accepted as connection:
                asked = b""
                while not asked.endswith(body):
                    asked += connection.recv(65536)
                connection.sendall(whole(body))
                assert more.wait(10)
                connection.sendall(whole(b"stale"))
                sent.set()
                with contextlib.suppress(OSError):
                    connection.recv(1)

    async def scenario(port: int) -> None:
        sockets: list[socket.socket] = []

        def made(address: Any) -> socket.socket:
            sockets.append(socket.socket(*address[:3]))
            return sockets[-1]

        connector = Connector(keepalive_timeout=5.0, on_surplus=said.append, socket_factory=made)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(body: bytes) -> bytes:
                url, name = (
                    (f"https://127.0.0.1:{port}/", "pool.example")
                    if tls
                    else (f"http://127.0.0.1:{port}/", None)
                )
                async with session.post(url, data=body, ssl=trusted, server_hostname=name) as response:
                    return await response.read()

            assert await ask(b"first") == b"first"
            more.set()
            assert sent.wait(10)
            assert await ask(b"second") == b"second"
        await asyncio.to_thread(
            until, lambda: all(each.fileno() < 0 for each in sockets), SLACK_S, "a connection is left open"
        )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        port = listener.getsockname()[1]
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(scenario(port))
        thread.join()
    assert said == ([] if tls else [f"127.0.0.1:{port}"])
