"""Uploads through URLs of the bucket itself: what `complete` found there is the file, whatever comes later.

One instance hands them out, the other those of the API, over the same bucket.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec
import psutil
import pytest

from schemas.settings import Limits
from services.api.files import PENDING_TTL_S
from services.api.sweeper import GRACE_MS, Sweeper
from services.api.tables import connect
from streams.blobs import Blobs, open_blobs
from tests.api.conftest import api_settings
from tests.api.host import RIVAL, Host, complete, content, create, error, jsonl, record
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until
from tests.support.s3 import new_bucket, strict_s3_server

CONTENT = jsonl([record("a", pad="x" * 50_000)])
OTHER = CONTENT.replace(b"x", b"y")
Hosts = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The first hands out URLs of the bucket, the second of the API."""
    directory = tmp_path_factory.mktemp("presigned-bucket")
    broker = EmbeddedBroker(directory)
    broker.start()
    try:
        with strict_s3_server(directory / "s3") as endpoint:
            storage = new_bucket(endpoint)
            settings = api_settings(broker, directory, storage=storage, limits=Limits(max_records=1_000))
            direct = msgspec.structs.replace(storage, presigned_puts="bucket")
            with (
                Host(directory / "one", msgspec.structs.replace(settings, storage=direct)) as one,
                Host(directory / "two", settings) as two,
            ):
                yield one, two
    finally:
        broker.stop()


@pytest.fixture
def blobs(hosts: Hosts) -> Blobs:
    return open_blobs(hosts[0].settings.storage)


def presign(host: Host, size: int = len(CONTENT)) -> tuple[str, str]:
    with host.client() as client:
        answer = client.post("/v1/files/presign", json={"bytes": size}).raise_for_status().json()
    assert set(answer) == {"file_id", "put_url", "expires_at"}
    return answer["file_id"], answer["put_url"]


def put(url: str, content: bytes = CONTENT) -> int:
    return httpx.put(url, content=content, trust_env=False).status_code


def objects(blobs: Blobs, file: str) -> list[str]:
    """The places where something of a file lies."""
    return [name.partition("/")[0] for name in blobs.list("") if file in name]


def test_the_whole_way(hosts: Hosts, blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(CONTENT)
    (tmp_path / "larger.jsonl").write_bytes(CONTENT + b"\n")
    with hosts[0].client() as client:
        before = time.time()
        answer = client.post("/v1/files/presign", json={"bytes": len(CONTENT), "filename": "x.jsonl"}).json()
        file, url = answer["file_id"], answer["put_url"]
        assert url.startswith(hosts[0].settings.storage.options["endpoint"])
        fields = parse_qs(urlsplit(url).query)
        assert fields["X-Amz-SignedHeaders"] == ["content-length;host"]
        assert fields["X-Amz-Expires"] == ["900"]
        assert before + 899 <= answer["expires_at"] <= time.time() + 901

        def unseen() -> None:
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content"):
                assert client.get(path).status_code == 404
            assert client.delete(f"/v1/files/{file}").status_code == 404
            assert file not in client.get("/v1/files").text

        def curl(name: str) -> str:
            command = (
                "curl",
                "-sS",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "-T",
                str(tmp_path / name),
                url,
            )
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        assert curl("larger.jsonl") == "403"
        unseen()
        early = complete(hosts[0], file)
        assert (early.status_code, error(early)["code"]) == (400, "not_uploaded")
        assert curl("input.jsonl") == "200"
        unseen()
        done = complete(hosts[0], file).raise_for_status()
        assert done.json()["bytes"] == len(CONTENT)
        assert client.get(f"/v1/files/{file}").json() == done.json()
        assert sorted(objects(blobs, file)) == ["puts", "tickets"]
        assert content(hosts[0], file) == CONTENT
        batch = create(client, input_file_id=file)
        refused = client.delete(f"/v1/files/{file}")
        assert (refused.status_code, error(refused)["code"]) == (409, "file_in_use")
        assert batch["id"] in error(refused)["message"]


def test_changed_urls(hosts: Hosts, blobs: Blobs) -> None:
    file, url = presign(hosts[0])
    other, _ = presign(hosts[0])
    name = urlsplit(url).path.rpartition("/")[2]
    owner = name.split(".")[1]
    changed = (
        url.replace(file, other),
        url.replace(owner, "0" * 16),
        url.replace(f".{len(CONTENT)}.", ".1."),
        url.replace("X-Amz-Expires=900", "X-Amz-Expires=9000"),
        url.replace("/arrivals/", "/puts/"),
    )
    assert {put(each) for each in changed} == {403}
    assert objects(blobs, file) == objects(blobs, other) == ["tickets"]
    assert put(url) == 200


def test_the_url_ends(hosts: Hosts, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(hosts[0].settings, limits=Limits(presign_ttl_s=1))
    with Host(tmp_path, settings) as host:
        file, url = presign(host)
        end = time.time() + 2
        while time.time() < end:
            time.sleep(0.05)
        assert put(url) == 403
        assert complete(host, file).status_code == 400


def test_another_organization(hosts: Hosts, blobs: Blobs) -> None:
    file, url = presign(hosts[0])
    foreign, unknown = complete(hosts[0], file, RIVAL), complete(hosts[0], "file-" + "0" * 32, RIVAL)
    assert foreign.status_code == unknown.status_code == 404
    assert error(foreign) == error(unknown)
    assert put(url) == 200
    assert complete(hosts[0], file, RIVAL).status_code == 404
    assert "puts" not in objects(blobs, file)
    complete(hosts[0], file).raise_for_status()
    assert complete(hosts[0], file, RIVAL).status_code == 404


def test_puts_after_complete_change_nothing(hosts: Hosts, blobs: Blobs) -> None:
    file, url = presign(hosts[0])
    assert [put(url, OTHER), put(url)] == [200, 200]
    done = complete(hosts[0], file).raise_for_status()
    assert put(url, OTHER) == 200
    assert {complete(host, file).content for host in (*hosts, *hosts)} == {done.content}
    assert {content(host, file) for host in hosts} == {CONTENT}
    with hosts[0].client() as client:
        client.delete(f"/v1/files/{file}").raise_for_status()
        assert put(url) == 200
        assert complete(hosts[0], file).status_code == 404
        assert client.get(f"/v1/files/{file}").status_code == 404
    assert sorted(objects(blobs, file)) == ["arrivals", "tickets"]


def test_completes_on_both_at_once(hosts: Hosts, blobs: Blobs) -> None:
    for _ in range(10):
        file, url = presign(hosts[0])
        assert put(url) == 200
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda n, file=file: complete(hosts[n % 2], file), range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert content(hosts[1], file) == CONTENT
        assert sorted(objects(blobs, file)) == ["puts", "tickets"]


def test_puts_and_completes_at_once(hosts: Hosts, blobs: Blobs) -> None:
    for _ in range(8):
        file, url = presign(hosts[0])
        assert put(url) == 200
        ended = threading.Event()

        def keep_putting(url: str = url, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                assert put(url, OTHER) == put(url, CONTENT) == 200

        with ThreadPoolExecutor(9) as threads:
            putting = threads.submit(keep_putting)
            answers = list(threads.map(lambda n, file=file: complete(hosts[n % 2], file), range(8)))
            read = [content(host, file) for host in (*hosts, *hosts)]
            ended.set()
            putting.result()
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert len(set(read)) == 1
        assert read[0] in (CONTENT, OTHER)
        assert content(hosts[0], file) == read[0]
        assert objects(blobs, file).count("puts") == 1


def test_a_refused_complete_is_refused_again(hosts: Hosts) -> None:
    bad = b"x\n" * 1_001
    file, url = presign(hosts[0], len(bad))
    assert put(url, bad) == 200
    assert error(complete(hosts[0], file))["code"] == "too_many_records"
    assert put(url, b"{}" + b"\n" * (len(bad) - 2)) == 200
    again = [complete(host, file) for host in hosts]
    assert {(each.status_code, error(each)["code"]) for each in again} == {(400, "too_many_records")}


def test_a_bucket_that_did_not_look_at_the_size(hosts: Hosts, blobs: Blobs) -> None:
    file, url = presign(hosts[0])
    blobs.put("arrivals/" + urlsplit(url).path.rpartition("/")[2], b"{}\n")
    refused = complete(hosts[0], file)
    assert refused.status_code == 400
    assert f"{len(CONTENT)} bytes" in error(refused)["message"]
    assert put(url) == 200
    complete(hosts[0], file).raise_for_status()


@pytest.mark.parametrize(("point", "found"), [("api.taking", OTHER), ("api.taken", CONTENT)])
def test_killed_while_completing(hosts: Hosts, point: str, found: bytes) -> None:
    """Before the log knows of it the URL is unused, afterwards the bytes are fixed."""
    host = hosts[0]
    host.stop()
    host.start(OPENRELAY_CRASH_AT=f"{point}:1")
    file, url = presign(host)
    assert put(url) == 200
    with pytest.raises(httpx.TransportError):
        complete(host, file)
    host.kill()
    host.start()
    assert put(url, OTHER) == 200
    complete(host, file).raise_for_status()
    assert content(host, file) == found


def test_another_instance_was_faster(hosts: Hosts) -> None:
    """Between the look at what the log says and the one at what has arrived."""
    slow = hosts[0]
    slow.stop()
    slow.start(OPENRELAY_CRASH_AT="api.arriving~1")
    assert slow.child is not None
    process = psutil.Process(slow.child.pid)
    file, url = presign(slow)
    assert put(url) == 200
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(complete, slow, file)
        until(lambda: process.status() == psutil.STATUS_STOPPED, 60, "the moment between")
        done = complete(hosts[1], file).raise_for_status()
        process.resume()
        assert waiting.result().content == done.content


def test_what_is_left_is_swept(hosts: Hosts, blobs: Blobs) -> None:
    done, done_url = presign(hosts[0])
    assert put(done_url) == 200
    complete(hosts[0], done).raise_for_status()
    never, never_url = presign(hosts[0])
    assert [put(done_url, OTHER), put(never_url)] == [200, 200]
    for host in hosts:
        content(host, done)
    path = Path(hosts[0].settings.data_dir) / "api" / "readmodel-0.sqlite"
    over_s = 900 + PENDING_TTL_S + GRACE_MS // 1000
    with contextlib.closing(connect(path)) as tables:

        def look_around(at_s: float) -> None:
            Sweeper(blobs, path, lambda: None).look_around(tables, round(at_s * 1000))

        look_around(time.time() + over_s - 30)
        assert "arrivals" in objects(blobs, done)
        assert "arrivals" in objects(blobs, never)
        look_around(time.time() + over_s + 1)
        assert objects(blobs, done) == ["puts"]
        assert objects(blobs, never) == []
        assert content(hosts[1], done) == CONTENT
        assert put(done_url, OTHER) == 200
        look_around(time.time() + over_s + 1)
        assert objects(blobs, done) == ["puts"]


def test_urls_of_the_api_are_what_they_were(hosts: Hosts) -> None:
    """Those handed out before the settings changed hold, on instances with either."""
    file, url = presign(hosts[1])
    assert url.startswith(f"{hosts[1].url}/v1/uploads/")
    assert complete(hosts[1], file).status_code == 400
    assert put(url.replace(hosts[1].url, hosts[0].url)) == 200
    assert put(url, OTHER) == 409
    done = complete(hosts[0], file).raise_for_status()
    assert complete(hosts[1], file).content == done.content
    assert content(hosts[0], file) == CONTENT
    file, url = presign(hosts[0])
    assert put(url) == 200
    complete(hosts[1], file).raise_for_status()
    assert content(hosts[0], file) == CONTENT


def test_while_the_bucket_is_away_callers_are_told_to_come_back(hosts: Hosts, tmp_path: Path) -> None:
    """A file that is deleted is so at once, whenever its bytes go."""
    with contextlib.ExitStack() as bucket:
        storage = new_bucket(bucket.enter_context(strict_s3_server(tmp_path / "s3")))
        settings = msgspec.structs.replace(hosts[1].settings, storage=storage)
        with Host(tmp_path / "three", settings) as host, host.client() as client:
            upload = {"files": {"file": ("a.jsonl", CONTENT)}, "data": {"purpose": "batch"}}
            file = client.post("/v1/files", **upload).raise_for_status().json()["id"]
            bucket.close()
            host.expected.add("the bucket: ")
            inline = {
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "requests": [record("a")],
            }
            for answer in (
                client.post("/v1/files", **upload),
                client.get(f"/v1/files/{file}/content"),
                client.post("/v1/files/presign", json={"bytes": 5}),
                client.post("/v1/batches", json=inline),
            ):
                assert (answer.status_code, error(answer)["code"]) == (503, "unavailable"), answer.text
                assert 0 < int(answer.headers["retry-after"]) <= 60
            assert client.delete(f"/v1/files/{file}").status_code == 200
            assert client.get(f"/v1/files/{file}").status_code == 404
