"""Creating, reading, listing and cancelling batches."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.facts import Cause, Withdrawn
from schemas.ids import BatchId
from schemas.settings import Limits, Organization
from tests.api.conftest import api_settings
from tests.api.host import CHAT, RIVAL, Facts, Host, create, error, jsonl, order, record, stored
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until

NARROW = "or_test_narrow_000000"
WAITING = 1_000


def post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/batches", json=order(**fields))


def test_the_batch_object(client: httpx.Client) -> None:
    file = stored(client)
    before = int(time.time())
    batch = create(client, input_file_id=file, metadata={"a": "b"}, priority="expedited")
    assert batch["id"].startswith("batch_")
    assert before - 1 <= batch["created_at"] <= time.time() + 1
    assert batch == {
        "id": batch["id"],
        "object": "batch",
        "endpoint": CHAT,
        "model": "m",
        "priority": "expedited",
        "input_file_id": file,
        "completion_window": "24h",
        "status": "validating",
        "created_at": batch["created_at"],
        "in_progress_at": None,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "expires_at": batch["created_at"] + 86_400,
        "output_file_id": None,
        "error_file_id": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
            "cost_nano_usd": 0,
            "unmetered_requests": 0,
        },
        "errors": None,
        "metadata": {"a": "b"},
    }
    shown = client.get(f"/v1/batches/{batch['id']}").json()
    assert shown["status"] in ("validating", "in_progress")
    shown |= {"status": "validating", "in_progress_at": None, "request_counts": batch["request_counts"]}
    assert shown == batch


def test_intake_takes_it_from_here(client: httpx.Client) -> None:
    batch = create(client, input_file_id=stored(client, jsonl([record("a"), b"x", record("b")])))["id"]

    def shown() -> dict[str, Any]:
        answer: dict[str, Any] = client.get(f"/v1/batches/{batch}").json()
        return answer

    until(lambda: shown()["status"] == "in_progress", 20, "intake")
    assert shown()["request_counts"] == {"total": 3, "completed": 0, "failed": 1}


def test_nulls_count_as_absent(client: httpx.Client) -> None:
    answer = post(client, metadata=None, model=None, priority=None, output_expires_after=None, future=None)
    assert answer.status_code == 200
    assert answer.json()["metadata"] is None
    assert answer.json()["priority"] == "standard"
    assert post(client, input_file_id=stored(client), requests=None).status_code == 200
    assert error(post(client, endpoint=None))["param"] == "endpoint"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"completion_window": ""}, "completion_window"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": ["standard"]}, "priority"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": ["x"]}, "metadata"),
        ({"metadata": {str(each): "x" for each in range(17)}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a": None}}, "metadata"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"model": ""}, "model"),
        ({"model": 7}, "model"),
        ({"model": "x" * 257}, "model"),
        ({"output_expires_after": 5}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3_600}}, "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3_599}},
            "output_expires_after.seconds",
        ),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after.seconds"),
        ({"unknown": 1}, "unknown"),
        ({"tools": []}, "tools"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"requests": {}}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": "x"}, "requests"),
        ({"requests": [{}], "input_file_id": "file-x"}, "input_file_id"),
        ({"requests": None}, "input_file_id"),
    ],
)
def test_bad_fields(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    before = client.get("/v1/batches?limit=1").json()["first_id"]
    answer = post(client, **fields)
    assert answer.status_code == 400, answer.text
    assert error(answer)["param"] == param
    assert client.get("/v1/batches?limit=1").json()["first_id"] == before


@pytest.mark.parametrize("name", ["endpoint", "completion_window"])
def test_required_fields(client: httpx.Client, name: str) -> None:
    body = order()
    del body[name]
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 400
    assert error(answer)["param"] == name
    assert error(answer)["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b"{} {}",
        b'{"endpoint":"/v1/chat/completions","endpoint":"/v1/chat/completions"}',
        b'{"requests":[],"requests":[]}',
        b'{"requests":[1]',
        b'{"requests":[1}',
        b'{"requests":[1,]}',
        b'{"requests":[,1]}',
        b'{"requests":[1 ],}',
        b'{"requests" [1]}',
        b"{requests:[1]}",
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"a":"' + b"x" * 300_000 + b'"}',
        b'{"a":' * 100_000,
        b"\xff\xfe{\x00}\x00",
        b"[" * 1_000_000,
    ],
)
def test_bodies_that_are_no_request(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/batches", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=utf-8", "", "x"])
def test_the_content_type_does_not_matter(client: httpx.Client, kind: str) -> None:
    body = json.dumps(order()).encode()
    assert client.post("/v1/batches", content=body, headers={"content-type": kind}).status_code == 200


def test_compressed_bodies(client: httpx.Client) -> None:
    answer = client.post("/v1/batches", content=b"{}", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


def test_the_largest_metadata(client: httpx.Client) -> None:
    metadata = {"😀" * 60 + f"{each:04}": "😀" * 512 for each in range(16)}
    assert create(client, metadata=metadata)["metadata"] == metadata
    controls = {"\x01" * 60 + f"{each:04}": "\x01" * 512 for each in range(16)}
    assert create(client, metadata=controls)["metadata"] == controls
    assert create(client, metadata={})["metadata"] == {}


def test_files_that_are_no_input(client: httpx.Client, rival: httpx.Client) -> None:
    foreign = stored(rival)
    ticket = client.post("/v1/files/presign", json={"bytes": 5}).json()["file_id"]
    answers = [
        post(client, input_file_id=file)
        for file in ("file-unknown", foreign, ticket, "", "\x00", "x" * 64_000, "\x01" * 10_000)
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1


def test_rejected_records_are_listed(client: httpx.Client) -> None:
    lines = [record("ok"), b"not json", b"[]", record("c") | {"method": "GET"}, record("d") | {"url": "/x"}]
    batch = create(client, input_file_id=stored(client, jsonl([*lines, record("e") | {"body": "x"}])))
    errors = batch["errors"]
    assert errors["object"] == "list"
    assert [(each["line"], each["code"], each["param"], each["custom_id"]) for each in errors["data"]] == [
        (2, "invalid_json", None, None),
        (3, "invalid_record", None, None),
        (4, "invalid_method", "method", "c"),
        (5, "url_mismatch", "url", "d"),
        (6, "invalid_body", "body", "e"),
    ]
    assert all(each["message"] for each in errors["data"])
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert client.get(f"/v1/batches/{batch['id']}").json()["errors"] == errors
    assert client.get("/v1/batches?limit=1").json()["data"][0]["errors"] == errors


def test_all_rejected_in_the_answer_and_100_in_later_reads(client: httpx.Client) -> None:
    batch = create(client, input_file_id=stored(client, b"x\n" * 250 + jsonl([record("a")])))
    assert [each["line"] for each in batch["errors"]["data"]] == list(range(1, 251))
    for _ in range(2):
        shown = client.get(f"/v1/batches/{batch['id']}").json()
        assert shown["errors"]["data"] == batch["errors"]["data"][:100]


def test_every_record_rejected(client: httpx.Client) -> None:
    batch = create(client, input_file_id=stored(client, b"x\ny\n"), model="hint")
    assert batch["status"] == "validating"
    assert batch["model"] == "hint"
    assert len(batch["errors"]["data"]) == 2
    assert create(client, input_file_id=stored(client, b"x\ny\n"))["model"] is None


def test_the_model_is_that_of_the_records(client: httpx.Client) -> None:
    lines = jsonl([record("a", model="?"), record("b", model="n"), record("c")])
    batch = create(client, input_file_id=stored(client, lines), model="m")
    assert batch["model"] == "n"
    assert [each["code"] for each in batch["errors"]["data"]] == ["model_not_found", "model_mismatch"]


def test_workflows_are_a_feature(client: httpx.Client, rival: httpx.Client) -> None:
    line = jsonl([record("a", openrelay={"workflow": {"url": "https://flow.example.com"}})])
    assert create(client, input_file_id=stored(client, line))["errors"] is None
    rejected = create(rival, input_file_id=stored(rival, line))["errors"]["data"]
    assert [each["code"] for each in rejected] == ["workflow_not_enabled"]


def test_lists(host: Host, facts: Facts) -> None:
    with host.client(RIVAL) as rival:
        made = [create(rival)["id"] for _ in range(5)][::-1]
        answer = rival.get("/v1/batches", params={"limit": 5}).json()
        assert [each["id"] for each in answer["data"]] == made
        assert (answer["object"], answer["first_id"], answer["last_id"]) == ("list", made[0], made[-1])
        page = rival.get("/v1/batches", params={"limit": 2, "after": made[0]}).json()
        assert [each["id"] for each in page["data"]] == made[1:3]
        assert page["has_more"] is True
        facts.finish(made[2])
        page = rival.get("/v1/batches", params={"limit": 2, "after": made[2]}).json()
        assert [each["id"] for each in page["data"]] == made[3:]


@pytest.mark.parametrize("limit", ["0", "101", "x", "-1", "1.5", ""])
def test_bad_limits(client: httpx.Client, limit: str) -> None:
    answer = client.get(f"/v1/batches?limit={limit}")
    assert answer.status_code == 400
    assert error(answer)["param"] == "limit"


@pytest.mark.parametrize("cursor", ["batch_never", "", "file-x"])
def test_unknown_cursors(client: httpx.Client, cursor: str) -> None:
    assert client.get("/v1/batches", params={"after": cursor}).status_code == 404


def test_cancel(client: httpx.Client, facts: Facts) -> None:
    batch = create(client)["id"]
    first = client.post(f"/v1/batches/{batch}/cancel")
    assert first.status_code == 200
    assert first.json()["status"] == "cancelling"
    assert first.json()["cancelling_at"] is not None
    until(lambda: client.get(f"/v1/batches/{batch}").json()["in_progress_at"], 20, "intake")
    again = client.post(f"/v1/batches/{batch}/cancel", json={})
    assert again.status_code == 200
    assert again.json() == client.get(f"/v1/batches/{batch}").json()
    assert again.json()["cancelling_at"] == first.json()["cancelling_at"]
    facts.settle(batch, Cause.CANCELLED)
    assert client.get(f"/v1/batches/{batch}").json()["status"] == "cancelling"
    facts.end(batch, None, "cancelled")
    ended = client.get(f"/v1/batches/{batch}").json()
    assert (ended["status"], ended["output_file_id"]) == ("cancelled", None)
    assert ended["cancelled_at"] is not None
    answer = client.post(f"/v1/batches/{batch}/cancel")
    assert answer.status_code == 409
    assert error(answer)["code"] == "batch_not_cancellable"
    assert answer.headers["x-should-retry"] == "false"


def test_cancel_while_finalizing_changes_nothing(client: httpx.Client, facts: Facts) -> None:
    batch = create(client)["id"]
    until(lambda: client.get(f"/v1/batches/{batch}").json()["in_progress_at"], 20, "intake")
    facts.settle(batch)
    before = client.get(f"/v1/batches/{batch}").json()
    assert before["status"] == "finalizing"
    answer = client.post(f"/v1/batches/{batch}/cancel")
    assert answer.status_code == 200
    assert answer.json() == before
    facts.end(batch)
    assert client.get(f"/v1/batches/{batch}").json()["status"] == "completed"
    assert client.post(f"/v1/batches/{batch}/cancel").status_code == 409


def test_cancel_unknown(client: httpx.Client) -> None:
    assert client.post("/v1/batches/batch_never/cancel").status_code == 404


def test_withdrawn_batches_never_were(client: httpx.Client, facts: Facts) -> None:
    batch = create(client)["id"]
    facts.append(Withdrawn(batch=BatchId(batch)))
    assert client.get(f"/v1/batches/{batch}").status_code == 404
    assert client.post(f"/v1/batches/{batch}/cancel").status_code == 404
    assert batch not in [each["id"] for each in client.get("/v1/batches").json()["data"]]


@pytest.fixture
def narrow(api_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Host]:
    """An API whose organizations may have a thousand records waiting, and at most two uploads under way."""
    limits = Limits(max_waiting_records=WAITING, max_concurrent_uploads=2)
    organization = Organization(id=f"org-{tmp_path.name}", api_keys=(NARROW,))
    settings = api_settings(api_broker, tmp_path, limits=limits, organizations=(organization,))
    with Host(tmp_path, settings) as running:
        yield running


def test_quota(narrow: Host) -> None:
    facts = Facts(narrow.settings)

    def lines(count: int) -> bytes:
        return b"x\n" + jsonl([record(str(each)) for each in range(count)])

    with narrow.client(NARROW) as client:

        def refused(file: str) -> None:
            answer = post(client, input_file_id=file)
            assert answer.status_code == 429
            assert error(answer)["code"] == "quota_exceeded"
            assert 0 < int(answer.headers["retry-after"]) <= 60

        half = stored(client, lines(WAITING // 2))
        first, second = (create(client, input_file_id=half)["id"] for _ in range(2))
        before = client.get("/v1/files").json(), client.get("/v1/batches").json()["first_id"]
        refused(stored(client, lines(1)))
        assert post(client).status_code == 429
        assert client.get("/v1/batches").json()["first_id"] == before[1]
        assert len(client.get("/v1/files").json()["data"]) == len(before[0]["data"]) + 1
        names = [path.name for path in Path(f"{narrow_root(narrow)}/batches").iterdir()]
        assert {first, second} <= set(names)
        facts.finish(first)
        third = create(client, input_file_id=half)["id"]
        refused(stored(client, lines(1)))
        facts.settle(second, Cause.CANCELLED)
        facts.end(second, None, "cancelled")
        facts.settle(third, Cause.EXPIRED)
        facts.end(third, None, "expired")
        many = stored(client, lines(WAITING + 1))
        answer = post(client, input_file_id=many)
        assert (answer.status_code, error(answer)["code"]) == (429, "quota_exceeded")
        assert "Split" in error(answer)["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert client.delete(f"/v1/files/{many}").status_code == 200
        create(client, input_file_id=stored(client, lines(WAITING)))
    facts.close()


def narrow_root(host: Host) -> str:
    return host.settings.storage.url.removeprefix("file://")


def test_quota_holds_for_creates_at_once(narrow: Host) -> None:
    with narrow.client(NARROW) as client:
        file = stored(client, jsonl([record(str(each)) for each in range(WAITING // 2)]))
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: post(client, input_file_id=file).status_code, range(8)))
    assert sorted(answers) == [200, 200, *[429] * 6]


def test_too_many_uploads(narrow: Host) -> None:
    go_on = threading.Event()
    began = threading.Barrier(3)
    head, tail = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n',
        b"{}\r\n--b--\r\n",
    )

    def slow() -> Iterator[bytes]:
        yield head
        began.wait(10)
        assert go_on.wait(10)
        yield tail

    def send(content: Any) -> httpx.Response:
        with narrow.client(NARROW) as client:
            kind = {"content-type": "multipart/form-data; boundary=b"}
            return client.post("/v1/files", content=content, headers=kind)

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(send, slow()) for _ in range(2)]
        began.wait(10)
        answer = until(lambda: (found := send(head + tail)).status_code == 429 and found, 5, "429")
        assert error(answer)["code"] == "too_many_uploads"
        with narrow.client(NARROW) as client:
            chunked = client.post("/v1/batches", content=iter([b"{}"]))
            assert (chunked.status_code, error(chunked)["code"]) == (429, "too_many_uploads")
            assert client.post("/v1/batches", content=b"{}").status_code == 400
        assert 0 < int(answer.headers["retry-after"]) <= 60
        go_on.set()
        assert [each.result().status_code for each in running] == [200, 200]
    assert send(head + tail).status_code == 200
