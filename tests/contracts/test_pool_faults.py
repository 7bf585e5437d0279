"""Model servers that break off, and large bodies and answers.

What is said of a server is said in plain words, not in names of our libraries.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.settings import Pool
from streams.core.judge import Broken, Outcome, Reply
from streams.pools.endpoint import Endpoint
from streams.pools.openai import LargeBody, OpenAIClient
from tests.support.rawserver import Asked, RawServer, answer


async def call(url: str, body: bytes | LargeBody, **options: Any) -> Outcome:
    client = OpenAIClient()
    try:
        endpoint = Endpoint("m", Pool(base_url=f"{url}/v1"))
        return await client.call(endpoint, "/v1/completions", body, timeout_s=20, **options)
    finally:
        await client.close()


async def broken(url: str) -> str:
    outcome = await call(url, b"{}")
    assert isinstance(outcome, Broken)
    return outcome.reason


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "the model server closed the connection before it had answered"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
            "the connection to the model server broke in the middle of the answer",
        ),
        (b"nonsense\r\n\r\n", "what the model server sent is not HTTP"),
    ],
)
async def test_a_server_that_does_not_answer(sent: bytes, said: str) -> None:
    with RawServer(lambda asked: [sent]) as server:
        assert await broken(server.url) == said


async def test_a_connection_that_is_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        said = await broken(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert said == "the connection to the model server broke: Connection reset by peer"


async def test_a_large_body_is_sent_whole_and_forgotten() -> None:
    """In parts, with its length said beforehand; the room it took is given back when it is sent."""
    sent, asked = asyncio.Event(), b"x" * 1_000_000

    def reply(request: Asked) -> list[bytes]:
        assert request.headers["content-length"] == str(len(asked))
        assert "transfer-encoding" not in request.headers
        assert request.body == asked
        return [answer(200, b"{}")]

    with RawServer(reply) as server:
        outcome = await call(server.url, LargeBody(asked, sent.set))
    assert isinstance(outcome, Reply)
    assert outcome.status == 200
    assert sent.is_set()


async def test_a_large_body_may_be_refused_unread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer(413, b"{}"))
                while connection.recv(1 << 20):
                    pass

        thread = threading.Thread(target=refuse)
        thread.start()
        body = LargeBody(b"x" * 16_000_000, lambda: None)
        outcome = await call(f"http://127.0.0.1:{listener.getsockname()[1]}", body)
        await asyncio.to_thread(thread.join)
    assert isinstance(outcome, Reply)
    assert outcome.status == 413


@pytest.mark.parametrize("announced", [True, False])
async def test_of_a_large_answer_no_more_is_read_than_there_is_room_for(announced: bool) -> None:
    free, size = 1_000, 30_000_000
    waiting, said = asyncio.Event(), asyncio.Event()
    room: list[int] = []

    async def wait(more: int) -> None:
        room.append(more)
        waiting.set()
        await said.wait()

    sent = 0

    def reply(request: Asked) -> Iterator[bytes]:
        nonlocal sent
        yield b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: %d\r\n\r\n" % size if announced else b"\r\n")
        for _ in range(size // 100_000):
            yield b" " * 100_000
            sent += 100_000

    with RawServer(reply) as server:
        task = asyncio.create_task(call(server.url, b"{}", free_bytes=free, room=wait))
        await waiting.wait()
        while (before := sent) < size:
            await asyncio.sleep(0.1)
            if sent == before:
                break
        assert sent < size // 2, "the rest waits at the server"
        said.set()
        outcome = await task
    assert isinstance(outcome, Reply)
    assert len(outcome.body) == size
    assert sum(room) == size - free
    assert not announced or len(room) == 1
