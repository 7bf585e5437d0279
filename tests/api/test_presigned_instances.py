"""A signed URL has one use, and completing is one thing, however many instances serve the callers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from schemas.settings import Limits
from tests.api.conftest import api_settings
from tests.api.host import RIVAL, Host, complete, content, error, jsonl, record
from tests.support.broker import EmbeddedBroker

SIZE = 200_000


@pytest.fixture(scope="module")
def hosts(
    api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Host, Host]]:
    directory = tmp_path_factory.mktemp("api-instances")
    settings = api_settings(api_broker, directory, limits=Limits(max_records=1_000))
    pair = Host(directory / "one", settings), Host(directory / "two", settings)
    try:
        for each in pair:
            each.start()
        yield pair
        for each in pair:
            assert each.stop() == 0
            each.check_log()
    finally:
        for each in pair:
            each.kill()


def content_of(who: str, size: int = SIZE) -> bytes:
    empty = jsonl([record(who, pad="")])
    return jsonl([record(who, pad="x" * (size - len(empty)))])


def presign(host: Host, size: int = SIZE) -> tuple[str, str]:
    """The file's id and the part of its URL behind the host."""
    with host.client() as client:
        answer = client.post("/v1/files/presign", json={"bytes": size}).raise_for_status().json()
    return answer["file_id"], answer["put_url"][len(host.url) :]


def put(host: Host, path: str, content: bytes) -> httpx.Response:
    return httpx.put(host.url + path, content=content, trust_env=False)


@contextmanager
def slow_put(host: Host, path: str, body: bytes) -> Iterator[Future[httpx.Response]]:
    """A PUT that has begun; it goes on when the block ends, or by itself after a while."""
    began, go_on = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield body[:100_000]
        began.set()
        assert go_on.wait(20)
        yield body[100_000:]

    def send() -> httpx.Response:
        headers = {"content-length": str(len(body))}
        return httpx.put(host.url + path, content=pieces(), headers=headers, trust_env=False, timeout=30)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(send)
        try:
            assert began.wait(10)
            yield running
        finally:
            go_on.set()


def test_completes_on_both_at_once(hosts: tuple[Host, Host]) -> None:
    for _ in range(10):
        file, path = presign(hosts[0])
        assert put(hosts[0], path, content_of("a")).status_code == 200
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda n, file=file: complete(hosts[n % 2], file), range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert content(hosts[1], file) == content_of("a")


def test_puts_on_both_at_once(hosts: tuple[Host, Host]) -> None:
    for _ in range(10):
        file, path = presign(hosts[0])
        bodies = content_of("a"), content_of("b")
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(put, hosts, (path, path), bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        (lost,) = (answer for answer in answers if answer.status_code == 409)
        assert error(lost)["code"] == "upload_url_used"
        complete(hosts[1], file).raise_for_status()
        assert content(hosts[0], file) == bodies[answers.index(lost) ^ 1]


def test_a_slow_put_that_came_second(hosts: tuple[Host, Host]) -> None:
    """Its client must not hear that its bytes are the file."""
    file, path = presign(hosts[0])
    with slow_put(hosts[0], path, content_of("a")) as slow:
        assert put(hosts[1], path, content_of("b")).status_code == 200
        done = complete(hosts[1], file).raise_for_status()
    assert slow.result().status_code == 409
    assert complete(hosts[0], file).json() == done.json()
    assert content(hosts[0], file) == content_of("b")
    root = Path(hosts[0].settings.storage.url.removeprefix("file://"))
    assert len(list((root / "puts").glob(f"{file}.*"))) == 1


def test_a_complete_takes_nothing_from_a_put_under_way(hosts: tuple[Host, Host]) -> None:
    file, path = presign(hosts[0])
    with slow_put(hosts[0], path, content_of("a")) as slow:
        for host in hosts:
            early = complete(host, file)
            assert (early.status_code, error(early)["code"]) == (400, "not_uploaded")
            assert complete(host, file, RIVAL).status_code == 404
        assert not slow.done()
    assert slow.result().status_code == 200
    assert complete(hosts[1], file, RIVAL).status_code == 404
    assert complete(hosts[1], file).status_code == 200


def test_a_refused_complete_leaves_the_url_used(hosts: tuple[Host, Host]) -> None:
    bad = b"x\n" * 1_001
    file, path = presign(hosts[0], len(bad))
    assert put(hosts[0], path, bad).status_code == 200
    refused = [complete(host, file) for host in (*hosts, *hosts)]
    assert {(each.status_code, error(each)["code"]) for each in refused} == {(400, "too_many_records")}
    again = put(hosts[1], path, b"{}" + b"\n" * (len(bad) - 2))
    assert (again.status_code, error(again)["code"]) == (409, "upload_url_used")


def test_a_put_that_was_cut_off_uses_nothing(hosts: tuple[Host, Host]) -> None:
    file, path = presign(hosts[0])
    with socket.create_connection(("127.0.0.1", hosts[0].port)) as broken:
        broken.sendall(b"PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % (path.encode(), SIZE))
    assert put(hosts[1], path, content_of("b")).status_code == 200
    assert complete(hosts[0], file).status_code == 200
