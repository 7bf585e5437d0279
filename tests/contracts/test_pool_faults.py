"""What is said of a model server that breaks off: in plain words, not in names of our libraries."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from schemas.settings import Pool
from streams.core.judge import Broken
from streams.pools.endpoint import Endpoint
from streams.pools.openai import OpenAIClient
from tests.support.rawserver import RawServer


async def broken(url: str) -> str:
    client = OpenAIClient()
    try:
        endpoint = Endpoint("m", Pool(base_url=f"{url}/v1"))
        outcome = await client.call(endpoint, "/v1/completions", b"{}", timeout_s=10)
    finally:
        await client.close()
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
