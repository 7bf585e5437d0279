"""What strangers do to connections: slow, large, cut off, malformed, many, idle."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from schemas.settings import Http
from tests.api.conftest import api_settings
from tests.api.host import ACME, IDLE, Host, error, jsonl, record, stored
from tests.api.raw import Raw, drip, head, refused
from tests.support.broker import EmbeddedBroker
from tests.support.until import SLACK_S

HEADER_S = 1.0
GRACE_S = 2.0


@pytest.fixture(scope="module")
def host(api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """With short deadlines."""
    directory = tmp_path_factory.mktemp("api-connections")
    http = Http(header_timeout_s=HEADER_S, body_grace_s=GRACE_S, min_body_bytes_per_s=100_000)
    with Host(directory, api_settings(api_broker, directory, http=http)) as running:
        yield running


@pytest.fixture
def raw(host: Host) -> Iterator[Raw]:
    connection = Raw(host.port)
    yield connection
    connection.socket.close()


MULTIPART = "Content-Type: multipart/form-data; boundary=b"
START = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
)
PATHS = [("POST", "/v1/files", MULTIPART), ("POST", "/v1/batches", "Content-Type: application/json")]


@pytest.mark.parametrize(("method", "path", "kind"), PATHS)
def test_announced_too_large_is_refused_before_the_body(raw: Raw, method: str, path: str, kind: str) -> None:
    raw.send(head(method, path, kind, "Content-Length: 300000000"))
    started = time.monotonic()
    refused(raw.read(), 413, "file_too_large")
    assert time.monotonic() - started < GRACE_S


def test_the_refusal_helps(raw: Raw) -> None:
    raw.send(head("POST", "/v1/files", MULTIPART, "Content-Length: 300000000"))
    assert b"JPEG" in raw.read()


def test_expect_100_continue(raw: Raw) -> None:
    raw.send(head("POST", "/v1/files", MULTIPART, "Content-Length: 300000000", "Expect: 100-continue"))
    refused(raw.read(), 413, "file_too_large")


@pytest.mark.parametrize(("path", "start"), [("/v1/files", START), ("/v1/batches", b"")])
def test_201_mb_in_chunks_is_refused_at_the_first_byte_over(host: Host, path: str, start: bytes) -> None:
    files = blob_names(host)
    raw = Raw(host.port)
    kind = MULTIPART if start else "Content-Type: application/json"
    raw.send(head("POST", path, kind, "Transfer-Encoding: chunked"))
    chunk = b"x" * 1_000_000
    sent = 0
    with contextlib.suppress(ConnectionError):
        for number in range(260):
            data = start + chunk if number == 0 else chunk
            raw.send(b"%x\r\n" % len(data), data, b"\r\n")
            sent += len(data)
    refused(raw.read(), 413, "file_too_large")
    # The kernel holds tens of megabytes that nobody has read.
    assert 200_000_000 < sent < 250_000_000
    raw.socket.close()
    assert blob_names(host) == files


def blob_names(host: Host) -> set[str]:
    root = Path(host.settings.storage.url.removeprefix("file://"))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("method", "path", "kind"), PATHS)
def test_one_byte_a_second(host: Host, method: str, path: str, kind: str) -> None:
    files = blob_names(host)
    raw = Raw(host.port)
    raw.send(head(method, path, kind, "Content-Length: 1000"))
    started = time.monotonic()
    drip(raw, START, 0.2)
    refused(raw.read(), 408)
    assert GRACE_S - 0.5 < time.monotonic() - started < GRACE_S + SLACK_S
    raw.socket.close()
    assert blob_names(host) == files


def test_headers_one_byte_a_second(raw: Raw) -> None:
    started = time.monotonic()
    drip(raw, head("GET", "/v1/models"), 0.2)
    refused(raw.read(), 408)
    assert HEADER_S - 0.3 < time.monotonic() - started < HEADER_S + SLACK_S


def test_nothing_sent(raw: Raw) -> None:
    started = time.monotonic()
    assert raw.read() == b""
    assert HEADER_S - 0.3 < time.monotonic() - started < HEADER_S + SLACK_S


def test_an_honest_slow_body_is_fine(host: Host) -> None:
    content = jsonl([record("a", pad="x" * 400_000)])
    body = START + content + b"\r\n--b--\r\n"

    def pieces() -> Iterator[bytes]:
        for position in range(0, len(body), 100_000):
            yield body[position : position + 100_000]
            time.sleep(GRACE_S / 3)

    with host.client() as client:
        answer = client.post(
            "/v1/files", content=pieces(), headers={"content-type": "multipart/form-data; boundary=b"}
        )
    assert answer.status_code == 200


def test_content_length_smaller_than_sent(raw: Raw) -> None:
    body = START + b"{}\r\n--b--\r\n"
    raw.send(head("POST", "/v1/files", MULTIPART, f"Content-Length: {len(body) - 10}"), body)
    assert raw.socket.recv(65_536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("method", "path", "kind"), PATHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_client_vanishes(host: Host, method: str, path: str, kind: str, chunked: bool) -> None:
    files = blob_names(host)
    raw = Raw(host.port)
    data = START + b"x" * 500_000
    if chunked:
        raw.send(head(method, path, kind, "Transfer-Encoding: chunked"), b"100000\r\n", data)
    else:
        raw.send(head(method, path, kind, "Content-Length: 1000000"), data)
    raw.socket.close()
    with host.client() as client:
        assert client.get("/v1/files").status_code == 200
        deadline = time.monotonic() + 5
        while blob_names(host) != files:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET http://x/health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x/../y\r\n\r\n",
        b"G(T /health HTTP/1.1\r\nHost: x\r\n\r\n",
        head("GET", "/v1/models", "Host: x"),
        head("GET", "/v1/models", "host: y"),
        head("POST", "/v1/files", "Content-Length: x"),
        head("POST", "/v1/files", "Content-Length: -1"),
        head("POST", "/v1/files", "Content-Length: 5", "Content-Length: 6"),
        head("POST", "/v1/files", "Content-Length: 5", "Transfer-Encoding: chunked"),
    ],
)
def test_malformed_requests(raw: Raw, data: bytes) -> None:
    raw.send(data)
    refused(raw.read(), 400)


@pytest.mark.parametrize("data", [b"HTTP/1.0\r\n\r\n", b"HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n"])
def test_a_host_may_have_no_name(raw: Raw, data: bytes) -> None:
    raw.send(b"GET /health ", data)
    assert raw.read().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("method", ["FOO", "get", "GETS", "M-SEARCH", "PURGE", "X" * 32])
def test_a_method_nobody_knows_is_one_that_is_not_available(raw: Raw, method: str) -> None:
    """And its body is read, or the connection closed behind the answer."""
    raw.send(
        head(method, "/v1/batches/x", "Content-Length: 2") + b"{}",
        head(method, "/v1/nothing"),
        head("GET", "/v1/models"),
    )
    first = raw.read()
    top = first.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert top[0].startswith("http/1.1 405 ")
    (allow,) = (line for line in top if line.startswith("allow: "))
    assert set(allow.removeprefix("allow: ").split(", ")) == {"get", "head"}


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/nothing", ACME, 404),
        ("/v1/files", None, 401),
        ("/v1/files", ACME, 405),
        ("/v1/files", IDLE, 404),
    ],
)
def test_a_method_nobody_knows_is_looked_at_last(host: Host, path: str, key: str | None, status: int) -> None:
    with host.client(key) as client:
        answer = client.request("FOO", path)
        assert answer.status_code == status
        error(answer)


CHUNKED = head("POST", "/v1/files", MULTIPART, "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "data",
    [
        head("POST", "/v1/files", "Content-Length: 5", "Content-Length: 5"),
        head("POST", "/v1/files", "Transfer-Encoding: chunked", "Content-Length: 5"),
        head("POST", "/v1/files", MULTIPART, "Transfer-Encoding: gzip"),
        head("POST", "/v1/files", MULTIPART, "Transfer-Encoding: chunked, gzip"),
        head("POST", "/v1/files", MULTIPART, "Transfer-Encoding: chunked, chunked"),
        head("GET", "/v1/files", "Folded: a\r\n b"),
        head("GET", "/v1/files", "Null: a\0b"),
        b"get /v1/files HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"fffffffffffffffffffff\r\n",
        CHUNKED + b"%x\r\n" % len(START) + START + b"no line end",
        CHUNKED + b"%x\r\n" % len(START) + START + b"\r\n0\r\nbad trailer\r\n\r\n",
        head("POST", "/v1/batches", "Transfer-Encoding: chunked") + b"2\r\n{}\r\nx",
    ],
)
def test_malformed_requests_in_two_pieces(host: Host, raw: Raw, data: bytes) -> None:
    """The fault comes when the request is with the application, or when it is not."""
    files = blob_names(host)
    raw.send(data[:-5])
    with host.client() as client:
        assert client.get("/v1/models").status_code == 200
    raw.send(data[-5:])
    started = time.monotonic()
    refused(raw.read(), 400)
    assert time.monotonic() - started < GRACE_S
    assert blob_names(host) == files


def test_a_malformed_request_is_answered_behind_those_before_it(raw: Raw) -> None:
    raw.send(
        head("GET", "/v1/models"), head("GET", "/v1/files"), b"nonsense\r\n\r\n", head("GET", "/v1/models")
    )
    answers = raw.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200", b"400"]
    refused(answers[answers.index(b"HTTP/1.1 400") :], 400)


def test_a_malformed_body_is_answered_behind_the_requests_before_it(raw: Raw) -> None:
    raw.send(head("GET", "/v1/files"), CHUNKED + b"zz\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", raw.read()) == [b"200", b"400"]


@pytest.mark.parametrize(
    "data", [b"GET /v1/mod", head("GET", "/v1/models")[:-2], CHUNKED, CHUNKED + b"100\r\nabc"]
)
def test_the_client_ends_early_and_listens(raw: Raw, data: bytes) -> None:
    raw.send(data)
    raw.socket.shutdown(socket.SHUT_WR)
    refused(raw.read(), 400)


def test_the_client_says_that_it_has_said_all(raw: Raw) -> None:
    raw.send(head("GET", "/v1/files"))
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.read().startswith(b"HTTP/1.1 200 ")


def test_headers_of_a_later_request_one_byte_a_second(raw: Raw) -> None:
    raw.send(head("GET", "/v1/models"), b"GET /v1/mod")
    assert re.findall(rb"HTTP/1.1 (\d+)", raw.read()) == [b"200", b"408"]


def test_headers_just_too_large_in_one_piece(raw: Raw) -> None:
    raw.send(head("GET", "/v1/models", "X-Long: " + "x" * 66_000))
    refused(raw.read(), 431)


def test_trailers_mean_nothing_and_have_an_end(raw: Raw) -> None:
    with contextlib.suppress(ConnectionError):
        raw.send(CHUNKED, b"0\r\n", *[b"X-%d: y\r\n" % each for each in range(20_000)])
    refused(raw.read(), 431)


@pytest.mark.parametrize(
    "path",
    ["/v1/files/%ff%fe", "/v1/files/%00", "/v1/batches/..%2f..%2fetc", "/v1/files/" + "x" * 5_000, "//"],
)
def test_odd_paths(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404
    assert client.get(path, params={"limit": "\x00"}).status_code == 404


def test_headers_of_a_megabyte(raw: Raw) -> None:
    with contextlib.suppress(ConnectionError):
        raw.send(head("GET", "/v1/models", "X-Long: " + "x" * 1_000_000))
    refused(raw.read(), 431)


def test_many_headers(raw: Raw) -> None:
    with contextlib.suppress(ConnectionError):
        raw.send(head("GET", "/v1/models", *[f"X-{each}: y" for each in range(100_000)]))
    refused(raw.read(), 431)


def test_upgrades_are_ignored(raw: Raw) -> None:
    raw.send(head("GET", "/v1/models", "Connection: Upgrade, close", "Upgrade: websocket"))
    assert raw.read().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [b"1", b"00000001", b"1;a=b"])
def test_a_body_may_come_in_chunks_of_one_byte(raw: Raw, size: bytes) -> None:
    content = jsonl([record("a", pad="x" * 100_000)])
    body = START + content + b"\r\n--b--\r\n"
    raw.send(CHUNKED, *[b"%s\r\n%c\r\n" % (size, byte) for byte in body], b"0\r\n\r\n")
    raw.send(head("GET", "/v1/no", "Connection: close"))
    answers = raw.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"404"]
    assert b'"bytes":%d' % len(content) in answers


OFFER = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"
"""What Java's client and curl send with their first request when they would rather speak HTTP/2."""


@pytest.mark.parametrize("split", [0, 1, 40, 200])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_http_2_keeps_its_body(host: Host, raw: Raw, chunked: bool, split: int) -> None:
    content = jsonl([record("a", pad="x" * 100_000)])
    body = START + content + b"\r\n--b--\r\n"
    if chunked:
        half = len(body) // 2
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    top = head("POST", "/v1/files", MULTIPART, framing, *OFFER)
    raw.send(top[: len(top) - split])
    with host.client() as client:
        assert client.get("/v1/models").status_code == 200
    raw.send(
        top[len(top) - split :],
        body,
        head("GET", "/v1/models", *OFFER),
        head("GET", "/v1/no", "Connection: close"),
    )
    answers = raw.read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200", b"404"]
    assert b'"bytes":%d' % len(content) in answers


def test_pipelined_requests_are_answered_in_order(raw: Raw) -> None:
    requests = [("/v1/models",), ("/v1/nothing",), ("/v1/models", "Connection: close")]
    raw.send(*[head("GET", *request) for request in requests])
    assert re.findall(rb"HTTP/1.1 (\d+)", raw.read()) == [b"200", b"404", b"200"]


def test_a_refused_body_closes_the_connection_and_a_read_one_does_not(raw: Raw) -> None:
    body = b"{}"
    raw.send(head("POST", "/v1/batches", f"Content-Length: {len(body)}"), body)
    answer = b""
    while not answer.endswith(b"}}"):
        answer += raw.socket.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    raw.send(head("POST", "/v1/nothing", f"Content-Length: {len(body)}"), body)
    refused(raw.read(), 404, "not_found")


def test_a_large_refused_body_does_not_cost_the_answer(host: Host) -> None:
    with host.client("or_wrong_key_wrong_key") as client:
        answer = client.post("/v1/batches", content=b"x" * 3_000_000)
    assert answer.status_code == 401
    assert error(answer)["code"] == "invalid_api_key"


def test_idle_connections_do_not_crowd_others_out(host: Host) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8_192)), hard))
    idle = [socket.create_connection(("127.0.0.1", host.port), timeout=30) for _ in range(2_000)]
    started = time.monotonic()
    with host.client() as client:
        assert client.get("/v1/models").status_code == 200
    for connection in idle:
        assert connection.recv(1) == b""
        connection.close()
    assert time.monotonic() - started < HEADER_S + SLACK_S


def test_a_download_nobody_reads_holds_up_nobody(host: Host, client: httpx.Client) -> None:
    file = stored(client, jsonl([record("a", pad="x" * 15_000_000)]))
    stalled = []
    for _ in range(40):
        raw = Raw(host.port)
        raw.send(head("GET", f"/v1/files/{file}/content"))
        stalled.append(raw)
    assert stored(client)
    assert len(client.get(f"/v1/files/{file}/content").content) > 15_000_000
    for raw in stalled:
        raw.socket.close()
