"""Files that exist: lists, contents, deletion, expiry."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import httpx
import pytest

from schemas.facts import FileDeleted, FileReleased, FileUsed
from schemas.ids import BatchId, FileId, OrganizationId
from schemas.settings import Limits
from services.api import ranges
from tests.api.conftest import api_settings
from tests.api.host import Facts, Host, create, error, jsonl, order, record, stored
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until

CONTENT = jsonl([record(str(each)) for each in range(10)])


@pytest.fixture
def several(fresh: httpx.Client) -> list[str]:
    """All files of an organization, newest first."""
    return [stored(fresh) for _ in range(5)][::-1]


def listed(client: httpx.Client, **query: object) -> list[str]:
    answer = client.get("/v1/files", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    ids = [each["id"] for each in body["data"]]
    assert body["object"] == "list"
    assert body["first_id"] == (ids[0] if ids else None)
    assert body["last_id"] == (ids[-1] if ids else None)
    return ids


def test_lists(fresh: httpx.Client, several: list[str]) -> None:
    assert listed(fresh) == several
    assert listed(fresh, order="desc", purpose="batch") == several
    assert listed(fresh, order="asc") == several[::-1]
    assert listed(fresh, purpose="batch_output") == []
    assert listed(fresh, purpose="banana") == []
    assert listed(fresh, limit=2) == several[:2]
    assert listed(fresh, limit=2, after=several[1]) == several[2:4]
    assert listed(fresh, limit=2, after=several[3]) == several[4:]
    assert listed(fresh, after=several[4]) == []
    assert listed(fresh, order="asc", after=several[3]) == several[:3][::-1]
    assert fresh.get("/v1/files?limit=4").json()["has_more"] is True
    assert fresh.get("/v1/files?limit=5").json()["has_more"] is False


def test_deleting_while_paging(fresh: httpx.Client, several: list[str]) -> None:
    seen = []
    after = {}
    while page := listed(fresh, limit=2, **after):
        seen += page
        for file in page:
            assert fresh.delete(f"/v1/files/{file}").json() == {"id": file, "object": "file", "deleted": True}
        after = {"after": page[-1]}
    assert seen == several
    assert listed(fresh) == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("limit=1.5", "limit"),
        ("limit=", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("order=up", "order"),
    ],
)
def test_bad_queries(client: httpx.Client, query: str, param: str) -> None:
    answer = client.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    assert error(answer)["param"] == param


@pytest.mark.parametrize("cursor", ["file-never", "", "batch_x", "\u0000", "x" * 1_000])
def test_unknown_cursors(client: httpx.Client, cursor: str) -> None:
    answer = client.get("/v1/files", params={"after": cursor})
    assert answer.status_code == 404
    assert error(answer)["code"] == "not_found"


def test_deletion(host: Host, client: httpx.Client) -> None:
    file = stored(client)
    root = Path(host.settings.storage.url.removeprefix("file://"))
    assert (root / "uploads" / file).exists()
    assert client.delete(f"/v1/files/{file}").json() == {"id": file, "object": "file", "deleted": True}
    assert not (root / "uploads" / file).exists()
    for answer in (
        client.get(f"/v1/files/{file}"),
        client.get(f"/v1/files/{file}/content"),
        client.delete(f"/v1/files/{file}"),
        client.post("/v1/batches", json=order(input_file_id=file)),
    ):
        assert answer.status_code == 404


def test_the_input_of_an_open_batch_stays(client: httpx.Client, facts: Facts) -> None:
    file = stored(client)
    batch = create(client, input_file_id=file)["id"]
    answer = client.delete(f"/v1/files/{file}")
    assert answer.status_code == 409
    assert error(answer)["code"] == "file_in_use"
    assert batch in error(answer)["message"]
    assert answer.headers["x-should-retry"] == "false"
    facts.settle(batch)
    assert client.delete(f"/v1/files/{file}").status_code == 409
    facts.end(batch)
    assert client.delete(f"/v1/files/{file}").status_code == 200


def test_the_input_of_a_create_under_way_stays(client: httpx.Client, facts: Facts) -> None:
    """The create runs on another instance and has come as far as its first fact."""
    file = FileId(stored(client))
    batch = BatchId("batch_" + secrets.token_hex(16))
    facts.file(FileUsed(file=file, batch=batch, attempt="a"), "a")
    answer = client.delete(f"/v1/files/{file}")
    assert (answer.status_code, error(answer)["code"]) == (409, "file_in_use")
    assert batch in error(answer)["message"]
    facts.file(FileReleased(file=file, attempt="a"), "a")
    assert client.delete(f"/v1/files/{file}").status_code == 200


def test_a_deletion_that_came_after_a_use_it_did_not_know(client: httpx.Client, facts: Facts) -> None:
    file = FileId(stored(client))
    facts.file(FileUsed(file=file, batch=BatchId("batch_" + secrets.token_hex(16)), attempt="a"), "a")
    facts.file(FileDeleted(file=file, organization=OrganizationId("acme"), seen=0), "stale")
    assert client.get(f"/v1/files/{file}").status_code == 200
    assert client.get(f"/v1/files/{file}/content").status_code == 200


def test_result_files(client: httpx.Client, facts: Facts) -> None:
    batch = create(client)["id"]
    file = f"file-{batch}-output"
    assert client.get(f"/v1/files/{file}").status_code == 404
    facts.finish(batch, b'{"custom_id":"a"}\n')
    shown = client.get(f"/v1/batches/{batch}").json()
    assert (shown["status"], shown["output_file_id"], shown["error_file_id"]) == ("completed", file, None)
    metadata = client.get(f"/v1/files/{file}").json()
    assert metadata["purpose"] == "batch_output"
    assert metadata["bytes"] == 18
    assert metadata["expires_at"] == metadata["created_at"] + 2_592_000
    assert client.get(f"/v1/files/{file}/content").content == b'{"custom_id":"a"}\n'
    assert file in listed(client, purpose="batch_output")
    answer = client.post("/v1/batches", json=order(input_file_id=file))
    assert answer.status_code == 400
    assert error(answer)["param"] == "input_file_id"
    assert client.delete(f"/v1/files/{file}").json()["deleted"] is True
    assert client.get(f"/v1/files/{file}/content").status_code == 404
    assert client.get(f"/v1/batches/{batch}").json()["output_file_id"] == file


def test_content(client: httpx.Client) -> None:
    file = stored(client, CONTENT)
    url = f"/v1/files/{file}/content"
    whole = client.get(url)
    assert whole.content == CONTENT
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-length"] == str(len(CONTENT))
    assert whole.headers["accept-ranges"] == "bytes"
    etag = whole.headers["etag"]
    head = client.head(url)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)
    assert head.headers["content-length"] == str(len(CONTENT))
    part = client.get(url, headers={"range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, CONTENT[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(CONTENT)}"
    assert client.get(url, headers={"range": "bytes=5-"}).content == CONTENT[5:]
    assert client.get(url, headers={"range": "bytes=-7"}).content == CONTENT[-7:]
    assert client.get(url, headers={"range": f"bytes=-{10**9}"}).content == CONTENT
    assert client.get(url, headers={"range": f"bytes=3-{10**9}"}).content == CONTENT[3:]
    clamped = client.get(url, headers={"range": "bytes=0-" + "9" * 23})
    assert (clamped.status_code, clamped.content) == (206, CONTENT)
    assert client.get(url, headers={"range": "bytes=1-2", "if-range": etag}).status_code == 206
    other = client.get(url, headers={"range": "bytes=1-2", "if-range": '"other"'})
    assert (other.status_code, other.content) == (200, CONTENT)
    for ignored in ("bytes=1-2,4-5", "bytes=x", "lines=1-2", "bytes=5-2", "bytes=-", "bytes=", ""):
        answer = client.get(url, headers={"range": ignored})
        assert (answer.status_code, answer.content) == (200, CONTENT), ignored
    for beyond in (f"bytes={len(CONTENT)}-", "bytes=999999999-", "bytes=-0"):
        answer = client.get(url, headers={"range": beyond})
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"
        error(answer)


def test_downloads_of_several_chunks(client: httpx.Client) -> None:
    content = jsonl([record(str(each), pad="x" * 1_000_000) for each in range(5)])
    file = stored(client, content)
    assert client.get(f"/v1/files/{file}/content").content == content
    part = client.get(f"/v1/files/{file}/content", headers={"range": "bytes=262140-2000000"})
    assert part.content == content[262_140:2_000_001]


@pytest.mark.parametrize(
    ("header", "size", "span"),
    [
        (None, 10, None),
        ("bytes=0-0", 10, (0, 1)),
        ("bytes=0-9", 10, (0, 10)),
        ("bytes=9-", 10, (9, 1)),
        ("bytes=-1", 10, (9, 1)),
        ("bytes=-10", 10, (0, 10)),
        ("bytes= 1-2 ", 10, (1, 2)),
        ("bytes=1-٢", 10, None),
        ("bytes=0-" + "9" * 23, 10, (0, 10)),
        ("bytes=3-" + "9" * 60_000, 10, (3, 7)),
        ("bytes=" + "0" * 60_000 + "3-4", 10, (3, 2)),
        ("bytes=-" + "9" * 60_000, 10, (0, 10)),
        ("bytes=" + "9" * 30 + "-" + "8" * 30, 10, None),
        ("bytes=" + "9" * 31 + "-" + "9" * 30, 10, None),
    ],
)
def test_ranges(header: str | None, size: int, span: tuple[int, int] | None) -> None:
    assert ranges.parse(header, size) == span


@pytest.mark.parametrize("header", ["bytes=" + "9" * 30 + "-", "bytes=" + "9" * 30 + "-" + "9" * 31])
def test_no_range_beyond_the_end(header: str) -> None:
    with pytest.raises(ranges.Unsatisfiable):
        ranges.parse(header, 10)


@pytest.mark.parametrize("header", ["bytes=0-", "bytes=-1", "bytes=0-0"])
def test_no_range_of_nothing(header: str) -> None:
    with pytest.raises(ranges.Unsatisfiable):
        ranges.parse(header, 0)


def test_expiry(api_broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = api_settings(api_broker, tmp_path, limits=Limits(file_ttl_s=3))
    host = Host(tmp_path, settings).start()
    try:
        with host.client() as client:
            file = stored(client)
            batch = create(client, input_file_id=stored(client))["id"]
            expires = client.get(f"/v1/files/{file}").json()["expires_at"]
            until(lambda: client.get(f"/v1/files/{file}").status_code == 404, 60, "expiry")
            assert expires <= time.time() < expires + 2
            for answer in (
                client.get(f"/v1/files/{file}/content"),
                client.delete(f"/v1/files/{file}"),
                client.post("/v1/batches", json=order(input_file_id=file)),
            ):
                assert answer.status_code == 404
            assert file not in listed(client)
            newer = stored(client)
            assert listed(client, order="asc", after=file)[-1] == newer
            # The batch has its own copy.
            assert client.get(f"/v1/batches/{batch}").json()["status"] in ("validating", "in_progress")
            assert list((api_broker.directory / "blobs/batches" / batch).glob("input-*.jsonl"))
        host.check_log()
    finally:
        host.kill()
