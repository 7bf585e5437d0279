"""Uploading a file, and every way of doing it wrong."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.api.multipart import UploadForm
from tests.api.host import Host, error, jsonl, record, upload

LINE = jsonl([record("a")])
BOUNDARY = "x-boundary-x"


def form(*parts: tuple[str, bytes], closing: bool = True) -> bytes:
    """A multipart body of (headers after `form-data; `, content)."""
    body = b"".join(
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    )
    return body + (f"--{BOUNDARY}--\r\n".encode() if closing else b"")


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="x.jsonl"', LINE)


def post(client: httpx.Client, body: Any, boundary: str = BOUNDARY, **headers: str) -> httpx.Response:
    kind = f"multipart/form-data; boundary={boundary}"
    return client.post("/v1/files", content=body, headers={"content-type": kind} | headers)


def test_the_file_object(client: httpx.Client) -> None:
    before = int(time.time())
    answer = upload(client, LINE)
    file = answer.json()
    assert answer.status_code == 200
    assert file["id"].startswith("file-")
    assert before - 1 <= file["created_at"] <= time.time() + 1
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(LINE),
        "created_at": file["created_at"],
        "expires_at": file["created_at"] + 2_592_000,
        "filename": f"{file['id']}.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert client.get(f"/v1/files/{file['id']}").json() == file
    assert client.get(f"/v1/files/{file['id']}/content").content == LINE


def test_parts_in_any_order_and_chunked(client: httpx.Client) -> None:
    for body in (form(PURPOSE, FILE), form(FILE, PURPOSE)):

        def dripped(body: bytes = body) -> Iterator[bytes]:
            for position in range(0, len(body), 7):
                yield body[position : position + 7]

        for sent in (body, dripped()):
            answer = post(client, sent)
            assert answer.status_code == 200, answer.text
            assert client.get(f"/v1/files/{answer.json()['id']}/content").content == LINE


def test_content_with_lines_that_look_like_boundaries(client: httpx.Client) -> None:
    content = jsonl([record("a", x=f"--{BOUNDARY}"), record("b", x=f"\r\n--{BOUNDARY}--\r\n")]) + b"--x-bound"
    answer = post(client, form(PURPOSE, ('name="file"; filename="x"', content)))
    assert answer.status_code == 200
    assert client.get(f"/v1/files/{answer.json()['id']}/content").content == content


def test_expires_after(client: httpx.Client) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(client, LINE, **fields).json()
    assert file["expires_at"] == file["created_at"] + 3_600
    for anchor, seconds, param in (
        ("created_at", "3599", "expires_after[seconds]"),
        ("created_at", "2592001", "expires_after[seconds]"),
        ("created_at", "x", "expires_after[seconds]"),
        ("created_at", "-1", "expires_after[seconds]"),
        ("created_at", "3600.0", "expires_after[seconds]"),
        ("now", "3600", "expires_after[anchor]"),
    ):
        answer = upload(client, LINE, **{"expires_after[anchor]": anchor, "expires_after[seconds]": seconds})
        assert answer.status_code == 400
        assert error(answer)["param"] == param
    assert (
        error(upload(client, LINE, **{"expires_after[seconds]": "3600"}))["param"] == "expires_after[anchor]"
    )
    assert (
        error(upload(client, LINE, **{"expires_after[anchor]": "created_at"}))["param"]
        == "expires_after[seconds]"
    )


@pytest.mark.parametrize(
    "name", ["../../x", "a\0b", "a\r\nb: c", "x" * 10_000, "\u202egnp.x", "", '"', "C:\\x"]
)
def test_file_names_do_not_matter(client: httpx.Client, name: str) -> None:
    quoted = name.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22")
    answer = post(client, form(PURPOSE, (f'name="file"; filename="{quoted}"', LINE)))
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert file["filename"] == f"{file['id']}.jsonl"
    content = client.get(f"/v1/files/{file['id']}/content")
    assert content.headers["content-disposition"] == f'attachment; filename="{file["id"]}.jsonl"'


def test_what_the_standard_allows_and_nobody_sends(client: httpx.Client) -> None:
    plain = form(PURPOSE, FILE)
    line = f"--{BOUNDARY}".encode()
    for body in (
        b"This is a message\r\nin several parts.\r\n" + plain,
        b"\r\n" + plain,
        f"not --{BOUNDARY}\r\n--{BOUNDARY}x\r\n".encode() + plain,
        plain + b"and that was all\r\n" + line + b"\r\n",
        plain.removesuffix(b"\r\n"),
        plain.replace(line + b"\r\n", line + b" \t \r\n"),
        plain.replace(line + b"--\r\n", line + b"--  \r\n"),
        plain.replace(b"form-data; ", b"form-data;\r\n\t "),
        plain.replace(b"Content-Disposition: ", b"X-Empty:\r\ncontent-disposition :\r\n  "),
    ):
        answer = post(client, body)
        assert answer.status_code == 200, (body, answer.text)
        assert client.get(f"/v1/files/{answer.json()['id']}/content").content == LINE


@pytest.mark.parametrize("size", [1, 2, 3, 7, 19, 1_000])
def test_forms_are_the_same_in_any_pieces(size: int) -> None:
    """Also where the file holds what is nearly a boundary."""
    lookalikes = (
        f"\r\n--{BOUNDARY}x\r\n--{BOUNDARY} -\r\n--{BOUNDARY}-\r\n-\r\n--x-bound\r\r\n\r\n--\n".encode()
    )
    content = LINE + lookalikes * 3
    body = b"before\r\n" + form(PURPOSE, ('name="file"; filename="x"', content)) + b"after"
    reading = UploadForm(f"multipart/form-data; boundary={BOUNDARY}")
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert b"".join(part for piece in pieces for part in reading.feed(piece)) == content
    reading.end()
    assert reading.fields == {"purpose": "batch"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(PURPOSE, PURPOSE, FILE), "purpose"),
        (form(PURPOSE, FILE, FILE), "file"),
        (form(PURPOSE, ('name="file"', LINE)), "file"),
        (form(('name="purpose"', b"banana"), FILE), "purpose"),
        (form(('name="purpose"', b"fine-tune"), FILE), "purpose"),
        (form(('name="purpose"', b""), FILE), "purpose"),
        (form(('name="purpose"', b"batch" * 1_000), FILE), "purpose"),
        (form(PURPOSE, FILE, ('name="other"', b"x")), "other"),
        (form(PURPOSE, FILE, ("x=y", b"x")), ""),
        (form(PURPOSE, FILE, closing=False), "file"),
        (form(PURPOSE, FILE)[:-40], "file"),
        (form(PURPOSE, FILE).replace(b"Content-Disposition:", b"Content-Disposition"), "file"),
        (form(PURPOSE, FILE).replace(b"Content-Disposition:", b"  : x\r\nContent-Disposition:"), "file"),
        (b"x" * 70_000 + b"\r\n" + form(PURPOSE, FILE), "file"),
        (form(PURPOSE, FILE)[:100], "file"),
        (b"", "file"),
        (b"--", "file"),
        (b"nonsense", "file"),
        (b"\r\n" * 50_000, "file"),
        (form(PURPOSE, ('name="file"; filename="x"\r\nContent-Transfer-Encoding: base64', LINE)), "file"),
    ],
)
def test_bad_forms(client: httpx.Client, body: bytes, param: str) -> None:
    listed = client.get("/v1/files").json()["data"]
    answer = post(client, body)
    assert answer.status_code == 400, answer.text
    assert error(answer)["param"] == param
    assert client.get("/v1/files").json()["data"] == listed


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "text/plain", ""]
)
def test_not_a_form(client: httpx.Client, kind: str) -> None:
    answer = client.post("/v1/files", content=b'{"purpose":"batch"}', headers={"content-type": kind})
    assert answer.status_code == 400
    assert error(answer)["param"] == "file"
    assert post(client, form(PURPOSE, FILE), boundary="x" * 300).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        form(PURPOSE, ('name="file"; filename="x"\r\nX-Long: ' + "x" * 100_000, LINE)),
        form(PURPOSE, ('name="file"; filename="x"' + "\r\nX-A: b" * 12_000, LINE)),
        form(*[(f'name="p{each}"', b"") for each in range(1_000)]),
        b"\r\n" * 2_500_000 + form(PURPOSE, FILE),
    ],
    ids=["long header", "many headers", "many parts", "long preamble"],
)
def test_hostile_forms_cost_little(host: Host, client: httpx.Client, body: bytes) -> None:
    assert host.child is not None
    before = _cpu_s(host.child.pid)
    answer = post(client, body)
    assert answer.status_code == 400
    assert _cpu_s(host.child.pid) - before < 1


def _cpu_s(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_content_encoding(client: httpx.Client) -> None:
    answer = post(client, gzip.compress(form(PURPOSE, FILE)), **{"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert error(answer)["code"] == "unsupported_content_encoding"
    assert post(client, form(PURPOSE, FILE), **{"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"\n\n \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_no_record(client: httpx.Client, content: bytes) -> None:
    answer = upload(client, content)
    assert answer.status_code == 400
    assert error(answer)["code"] == "empty_file"
    assert error(answer)["param"] == "file"


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf_16(client: httpx.Client, order: str) -> None:
    bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}[order]
    answer = upload(client, bom + LINE.decode().encode(order))
    assert answer.status_code == 400
    assert error(answer)["code"] == "unsupported_encoding"


def test_number_of_records(client: httpx.Client) -> None:
    assert upload(client, b"x\n" * 50_000 + b"\n\n").status_code == 200
    answer = upload(client, b"x\n" * 50_001)
    assert answer.status_code == 400
    assert error(answer)["code"] == "too_many_records"


def test_archives_are_files_of_bad_lines(client: httpx.Client) -> None:
    answer = upload(client, gzip.compress(LINE))
    assert answer.status_code == 200
    batch = client.post(
        "/v1/batches",
        json={
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "input_file_id": answer.json()["id"],
        },
    )
    assert batch.status_code == 200
    assert {each["code"] for each in batch.json()["errors"]["data"]} == {"invalid_json"}
