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
from structlog.testing import capture_logs

from schemas.settings import Pool
from streams.core.judge import Broken, Outcome, Reply, Unreachable
from streams.core.load import Load
from streams.dispatch import health
from streams.pools.endpoint import Endpoint
from streams.pools.openai import MAX_METRICS_BYTES, LargeBody, OpenAIClient
from streams.pools.pool import ModelPool
from tests.support.rawserver import Asked, RawServer, answer
from tests.support.until import SLACK_S, until


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
        (answer(0), "what the model server sent is not HTTP"),
        (answer(600), "what the model server sent is not HTTP"),
        (
            b"HTTP/1.1 101 Other\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "what the model server sent is not HTTP",
        ),
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


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (b"req-1", "req-1"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, None),
        (b"x" * 8_000, None),
        (b"", None),
        (b"a b", None),
        (b"a\tb", None),
        (b"req-\xff\xfe", None),
        ("réq".encode(), None),
    ],
)
async def test_an_id_of_the_servers_that_cannot_be_shown_is_none(said: bytes, kept: str | None) -> None:
    head, _, body = answer(200, b"{}").partition(b"\r\n\r\n")
    with RawServer(lambda asked: [head + b"\r\nx-request-id: " + said + b"\r\n\r\n" + body]) as server:
        outcome = await call(server.url, b"{}")
    assert isinstance(outcome, Reply)
    assert outcome.request_id == kept


METRICS = b"vllm:num_requests_running 120\nvllm:num_requests_waiting 7\n"


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([answer(200, METRICS)], Load(120, 7, 0.0, 0)),
        ([answer(200, METRICS)[:-31], 0.1, answer(200, METRICS)[-31:]], Load(120, 7, 0.0, 0)),
        ([answer(404, METRICS)], None),
        ([answer(200, b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 0\n")], None),
        ([answer(200, b"vllm:num_requests_running -100\nvllm:num_requests_waiting 100\n")], None),
        ([answer(200, METRICS + b" " * MAX_METRICS_BYTES)], None),
        ([answer(200, METRICS)[:-1]], None),
        ([b"nonsense\r\n\r\n"], None),
    ],
)
async def test_what_is_said_of_the_load(pieces: list[bytes | float], told: Load | None) -> None:
    """Read whole, however it comes, or not at all."""
    client = OpenAIClient()
    with RawServer(lambda asked: pieces) as server:
        assert await client.load(Endpoint("m", Pool(base_url=f"{server.url}/v1"))) == told
    await client.close()


@pytest.mark.parametrize(
    "pool",
    [
        Pool(base_url="http://127.0.0.1:9/v1", api_key="sk-hunter2\n"),
        Pool(base_url="http://127.0.0.1:9/v1", api_key="sk-hunter2-é"),
        Pool(base_url="http://127.0.0.1:9/v1", api_key="sk-hunter2-\ud800"),
        Pool(base_url="http://user:hunter2@127.0.0.1:9/v1", api_key="sk-hunter2"),
        Pool(base_url="http://user:hunter2@a..b/v1"),
        Pool(base_url="http://user:hunter2@" + "a" * 64 + ".example/v1"),
        Pool(base_url="http://user:hunter2@127.0.0.1:99999/v1"),
        Pool(base_url="http://user:hunter2@ho st/v1"),
        Pool(base_url="hunter2"),
    ],
)
async def test_settings_nothing_can_be_sent_with_are_no_answer_of_the_servers(pool: Pool) -> None:
    """The record keeps its attempts, and what is said repeats no secret."""
    client, endpoint = OpenAIClient(), Endpoint("m", pool)
    outcome = await client.call(endpoint, "/v1/completions", b"{}", timeout_s=20)
    assert isinstance(outcome, Unreachable)
    assert "hunter2" not in outcome.reason
    assert not await client.healthy(endpoint)
    assert await client.load(endpoint) is None
    assert not await client.key_accepted(endpoint)
    await client.close()


async def test_what_is_logged_of_a_sick_server_names_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "EVERY_S", 0.01)
    client, url = OpenAIClient(), "http://user:hunter2@127.0.0.1:1/v1"
    pool = ModelPool("m", (Pool(base_url=url),))
    pool.own(frozenset({0}), 1)
    slot = pool.acquire(0.0)
    assert slot is not None
    with capture_logs() as logs:
        watching = asyncio.create_task(health.watch({"m": pool}, client))
        await asyncio.to_thread(until, lambda: logs, SLACK_S, "nothing is logged")
        watching.cancel()
    slot.release()
    await client.close()
    assert logs[0]["endpoint"] == "127.0.0.1:1"
    assert "hunter2" not in str(logs)
    assert "hunter2" not in repr(pool.endpoints[0].pool)
