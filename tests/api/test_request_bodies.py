"""Bodies that nobody asked for, that hardly arrive or whose framing lies, on both hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from schemas.settings import Http
from services.api.protocol import LINGER_S
from tests.api.conftest import api_settings
from tests.api.host import Host
from tests.api.raw import Raw, drip, head, refused
from tests.support.broker import EmbeddedBroker
from tests.support.control import ControlHost
from tests.support.until import SLACK_S, until

MOST = 200
"""Connections at once, few enough for a test to take them all."""
UNASKED = [
    ("GET", "/health", 200),
    ("GET", "/openapi.json", 200),
    ("POST", "/health", 405),
    ("POST", "/v1/usage", 401),
    ("PUT", "/nowhere", 401),
]


@pytest.fixture(scope="module", params=["inference", "control"])
def port(
    request: pytest.FixtureRequest, api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    directory = tmp_path_factory.mktemp(request.param)
    settings = api_settings(api_broker, directory, http=Http(max_connections=MOST))
    if request.param == "inference":
        with Host(directory, settings) as host:
            yield host.port
        return
    control = ControlHost(directory, settings)
    control.start()
    try:
        yield control.port
    finally:
        control.stop()


@pytest.fixture
def raw(port: int) -> Iterator[Raw]:
    connection = Raw(port)
    yield connection
    connection.socket.close()


def keyless(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def serves(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("framing", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("method", "path", "status"), UNASKED)
def test_an_unread_body_of_a_byte_a_second_ends_the_connection(
    raw: Raw, method: str, path: str, status: int, framing: str
) -> None:
    raw.send(keyless(method, path, framing), b"186a0\r\n" if "chunked" in framing else b"")
    started = time.monotonic()
    drip(raw, b"x" * 100, 1.0)
    top = raw.read().partition(b"\r\n\r\n")[0].lower()
    assert time.monotonic() - started < LINGER_S + SLACK_S
    assert top.startswith(b"http/1.1 %d " % status)
    assert b"\r\nconnection: close" in top
    assert b"\r\nx-request-id: req_" in top


def test_the_request_behind_an_unread_body_is_not_answered(raw: Raw) -> None:
    raw.send(keyless("GET", "/health", "Content-Length: 2"), b"{}", keyless("GET", "/health"))
    assert raw.read().count(b"HTTP/1.1 200 ") == 1


def test_a_request_without_a_body_keeps_the_connection(raw: Raw) -> None:
    raw.send(*[keyless("GET", "/health"), keyless("GET", "/health", "Connection: close")])
    assert raw.read().count(b"HTTP/1.1 200 ") == 2


def test_unread_bodies_on_all_connections_crowd_nobody_out_for_long(port: int) -> None:
    crowd = [Raw(port) for _ in range(MOST)]
    for each in crowd:
        each.send(keyless("GET", "/health", "Content-Length: 100000"))
        drip(each, b"x" * 100, 1.0)
    started = time.monotonic()
    until(lambda: serves(port), LINGER_S + SLACK_S, "others are not served")
    for each in crowd:
        each.read()
        each.socket.close()
    assert time.monotonic() - started < LINGER_S + SLACK_S


ENDLESS = 64 * 1024 * 1024
"""Far more than is read of framing that carries nothing, and than the kernels hold."""
FRAMING = [
    (b"5;", b"a" * 65_536),
    (b"", b"1;" + b"e" * 60_000 + b"\r\n\n\r\n"),
    (b"", b"0" * 65_536),
    (b"0\r\nX-Trailer: ", b"a" * 65_536),
]
"""How it begins and how it goes on."""


@pytest.mark.parametrize(("start", "again"), FRAMING)
def test_framing_that_carries_nothing_is_refused(port: int, raw: Raw, start: bytes, again: bytes) -> None:
    """Where the body is read; elsewhere the answer has come before."""
    raw.send(head("POST", "/v1/batches", "Transfer-Encoding: chunked"), start)
    for _ in range(16):
        raw.send(again)
    answer = raw.read()
    if answer.startswith(b"HTTP/1.1 404 "):
        refused(answer, 404, "not_found")
    else:
        refused(answer, 400)
        assert serves(port)


@pytest.mark.parametrize(("start", "again"), FRAMING)
def test_framing_without_end_ends_the_connection(port: int, raw: Raw, start: bytes, again: bytes) -> None:
    raw.send(head("POST", "/v1/batches", "Transfer-Encoding: chunked"), start)
    with pytest.raises(ConnectionError):
        raw.send(*[again] * (ENDLESS // len(again)))
    assert serves(port)


@pytest.mark.parametrize(
    "lines",
    [
        ["Transfer-Encoding: gzip, chunked"],
        ["Transfer-Encoding: identity, chunked"],
        ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: ,chunked"],
        ["Transfer-Encoding: chunked;q=1"],
        ["Transfer-Encoding: xchunked"],
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/batches"])
def test_another_transfer_coding_is_refused(raw: Raw, path: str, lines: list[str]) -> None:
    raw.send(head("POST", path, *lines), b"2\r\n{}\r\n0\r\n\r\n")
    answer = raw.read()
    refused(answer, 400)
    assert b"Transfer-Encoding" in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("coding", ["chunked", "Chunked", " chunked "])
def test_chunked_is_read(raw: Raw, coding: str) -> None:
    raw.send(head("POST", "/health", f"Transfer-Encoding: {coding}"), b"2\r\n{}\r\n0\r\n\r\n")
    assert raw.read().startswith(b"HTTP/1.1 405 ")
