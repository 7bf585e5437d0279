"""Uploads through a signed URL, as browsers do them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import httpx
import pytest

from schemas.ids import FileId, OrganizationId
from schemas.settings import Http, Limits, Secrets
from services.api.presign import Signer, Ticket
from tests.api.conftest import api_settings
from tests.api.host import Host, create, error, jsonl, record
from tests.support.broker import EmbeddedBroker

CONTENT = jsonl([record("a")])
ORIGIN = "https://app.example.com"
TTL_S = 5
"""Long enough for the requests of a test, short enough to wait for."""


@pytest.fixture(scope="module")
def host(api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("api-presigned")
    settings = api_settings(
        api_broker,
        directory,
        http=Http(cors_origins=(ORIGIN,)),
        limits=Limits(presign_ttl_s=TTL_S, max_file_bytes=2_000_000, max_records=1_000),
    )
    with Host(directory, settings) as running:
        yield running


def presign(client: httpx.Client, size: int = len(CONTENT)) -> tuple[str, str]:
    answer = client.post("/v1/files/presign", json={"bytes": size, "filename": "x.jsonl"})
    assert answer.status_code == 200, answer.text
    return answer.json()["file_id"], answer.json()["put_url"]


def put(url: str, content: object = CONTENT, **headers: str) -> httpx.Response:
    return httpx.put(url, content=content, headers=headers, trust_env=False)  # type: ignore[arg-type]


def test_the_whole_way(client: httpx.Client) -> None:
    before = time.time()
    ticket = client.post("/v1/files/presign", json={"bytes": len(CONTENT)}).json()
    assert set(ticket) == {"file_id", "put_url", "expires_at"}
    assert before + TTL_S - 1 <= ticket["expires_at"] <= time.time() + TTL_S + 1
    file = ticket["file_id"]

    def unseen() -> None:
        for answer in (
            client.get(f"/v1/files/{file}"),
            client.delete(f"/v1/files/{file}"),
            client.get(f"/v1/files/{file}/content"),
            client.get("/v1/files", params={"after": file}),
            client.post(
                "/v1/batches",
                json={"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file},
            ),
        ):
            assert answer.status_code == 404
            assert error(answer)["code"] == "not_found"
        assert file not in [each["id"] for each in client.get("/v1/files").json()["data"]]

    unseen()
    answer = client.post(f"/v1/files/{file}/complete")
    assert answer.status_code == 400
    assert error(answer)["code"] == "not_uploaded"
    assert put(ticket["put_url"]).status_code == 200
    unseen()
    answer = client.post(f"/v1/files/{file}/complete")
    assert answer.status_code == 200
    assert answer.json()["bytes"] == len(CONTENT)
    assert client.post(f"/v1/files/{file}/complete").json() == answer.json()
    assert client.get(f"/v1/files/{file}").json() == answer.json()
    assert client.get(f"/v1/files/{file}/content").content == CONTENT
    assert create(client, input_file_id=file)["input_file_id"] == file


@pytest.mark.parametrize("size", [0, -1, "1e9", "5", 1.5, True, None, [], {}])
def test_bad_sizes(client: httpx.Client, size: object) -> None:
    answer = client.post("/v1/files/presign", json={"bytes": size})
    assert answer.status_code == 400
    assert error(answer)["param"] == "bytes"


def test_an_integer_may_be_spelled_with_a_fraction_or_an_exponent(client: httpx.Client) -> None:
    """As JSON Schema has it: what a number is, not how it is written."""
    for size in ("1e3", "1000.0"):
        answer = client.post("/v1/files/presign", content=b'{"bytes":%s}' % size.encode())
        assert "bytes=1000&" in answer.json()["put_url"]


@pytest.mark.parametrize("size", [2_000_001, 2**70, 1e300])
def test_sizes_over_the_limit(client: httpx.Client, size: int) -> None:
    answer = client.post("/v1/files/presign", json={"bytes": size})
    assert answer.status_code == 413
    assert error(answer)["code"] == "file_too_large"


def test_a_body_too_large(client: httpx.Client) -> None:
    answer = client.post("/v1/files/presign", json={"bytes": 5, "filename": "x" * 70_000})
    assert (answer.status_code, error(answer)["code"]) == (413, "file_too_large")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"x", b'{"bytes":1,"bytes":2}', b'{"bytes":1,"x":2}', b'{"bytes":1,"filename":3}'],
)
def test_bad_bodies(client: httpx.Client, body: bytes) -> None:
    assert client.post("/v1/files/presign", content=body).status_code == 400


def test_changed_urls(client: httpx.Client) -> None:
    file, url = presign(client)
    other, _ = presign(client)
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert set(query) == {"organization", "bytes", "expires", "key", "signature"}

    def changed(file_id: str = file, **fields: str | None) -> str:
        changes = {name: value for name, value in (query | fields).items() if value is not None}
        path = parts.path.replace(file, file_id)
        return urlunsplit((parts.scheme, parts.netloc, path, str(httpx.QueryParams(changes)), ""))

    answers = [
        put(changed(other)),
        put(changed("file-x")),
        put(changed(expires=str(int(query["expires"]) + 1))),
        put(changed(bytes=str(len(CONTENT) + 1))),
        put(changed(organization="rival")),
        put(changed(key="00000000")),
        put(changed(signature=query["signature"][:-1] + ("1" if query["signature"][-1] == "0" else "0"))),
        put(changed(signature="")),
        put(changed(signature="é")),
        put(changed(signature=None)),
        put(changed(expires="x")),
        put(changed(expires=None)),
        put(url.partition("?")[0]),
        put(changed(bytes="0" + query["bytes"])),
        put(changed(expires="0" + query["expires"])),
        put(url + "&x=y"),
        put(url + "&bytes=" + query["bytes"]),
        put(url + "&"),
        put(url.replace("?", "?bytes=1&")),
        put(url.replace("organization=acme", "organization=%61cme")),
    ]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1
    assert error(answers[0])["code"] == "invalid_signature"
    for method in ("GET", "POST", "DELETE"):
        assert httpx.request(method, url, trust_env=False).status_code == 405
    assert put(url).status_code == 200


def test_expired(client: httpx.Client) -> None:
    _, url = presign(client)
    expires = int(parse_qs(urlsplit(url).query)["expires"][0])
    while time.time() < expires:
        time.sleep(0.05)
    answer = put(url)
    assert answer.status_code == 403
    assert error(answer)["code"] == "invalid_signature"


def test_bad_puts(client: httpx.Client) -> None:
    file, url = presign(client)
    assert put(url, CONTENT[:-1]).status_code == 400
    assert put(url, CONTENT + b"x").status_code == 400
    assert put(url, b"").status_code == 400
    assert put(url, iter([CONTENT])).status_code == 411
    assert put(url, CONTENT, **{"content-encoding": "gzip"}).status_code == 415
    assert client.post(f"/v1/files/{file}/complete").status_code == 400
    assert put(url).status_code == 200
    answer = put(url)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    client.post(f"/v1/files/{file}/complete").raise_for_status()
    assert put(url).status_code == 409
    assert client.get(f"/v1/files/{file}/content").content == CONTENT


def test_put_during_put(client: httpx.Client) -> None:
    content = jsonl([record("a", pad="x" * 500_000)])
    file, url = presign(client, len(content))
    began, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[bytes]:
        yield content[:100]
        began.set()
        assert go_on.wait(10)
        yield content[100:]

    answers: list[httpx.Response] = []
    first = threading.Thread(
        target=lambda: answers.append(put(url, slow(), **{"content-length": str(len(content))}))
    )
    first.start()
    assert began.wait(10)
    deadline = time.monotonic() + 5
    while put(url, b"y" * len(content)).status_code != 409:
        assert time.monotonic() < deadline
    go_on.set()
    first.join()
    assert answers[0].status_code == 200
    client.post(f"/v1/files/{file}/complete").raise_for_status()
    assert client.get(f"/v1/files/{file}/content").content == content


def test_two_completes_at_once(client: httpx.Client, host: Host) -> None:
    file, url = presign(client)
    put(url).raise_for_status()
    answers: list[bytes] = []

    def complete() -> None:
        with host.client() as mine:
            answers.append(mine.post(f"/v1/files/{file}/complete").raise_for_status().content)

    threads = [threading.Thread(target=complete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"x\n" * 1_001, "too_many_records"),
        (b"\n \n", "empty_file"),
        (b"\xff\xfex\x00", "unsupported_encoding"),
    ],
)
def test_complete_checks_as_an_upload_is_checked(client: httpx.Client, content: bytes, code: str) -> None:
    file, url = presign(client, len(content))
    put(url, content).raise_for_status()
    answer = client.post(f"/v1/files/{file}/complete")
    assert answer.status_code == 400
    assert error(answer)["code"] == code
    assert client.get(f"/v1/files/{file}").status_code == 404
    assert client.post(f"/v1/files/{file}/complete").status_code == 400


def test_complete_with_a_stored_object_of_another_size(client: httpx.Client, host: Host) -> None:
    file, url = presign(client)
    put(url).raise_for_status()
    root = Path(host.settings.storage.url.removeprefix("file://"))
    (stored,) = (root / "puts").glob(f"{file}.*")
    stored.write_bytes(CONTENT + b"x")
    assert client.post(f"/v1/files/{file}/complete").status_code == 400


@pytest.mark.parametrize("file", ["file-x", "batch_x", "file-" + "0" * 32, "..%2f..", "file-0."])
def test_complete_of_unknown_files(client: httpx.Client, file: str) -> None:
    assert client.post(f"/v1/files/{file}/complete").status_code == 404


def test_completing_a_deleted_file(client: httpx.Client) -> None:
    file, url = presign(client)
    put(url).raise_for_status()
    client.post(f"/v1/files/{file}/complete").raise_for_status()
    client.delete(f"/v1/files/{file}").raise_for_status()
    assert client.post(f"/v1/files/{file}/complete").status_code == 404


def test_cors(client: httpx.Client, host: Host) -> None:
    file, url = presign(client)
    path = url[url.index("/v1/") :]
    for route in ("/v1/files/presign", path, f"/v1/files/{file}/complete"):
        asked = {"origin": ORIGIN, "access-control-request-method": "PUT"}
        answer = httpx.options(host.url + route, headers=asked, trust_env=False)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "PUT" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        other = httpx.options(host.url + route, headers=asked | {"origin": "https://evil"}, trust_env=False)
        assert "access-control-allow-origin" not in other.headers
    for answer in (
        client.post("/v1/files/presign", json={"bytes": 1}, headers={"origin": ORIGIN}),
        client.post("/v1/files/presign", json={}, headers={"origin": ORIGIN}),
        put(url, origin=ORIGIN),
        put(url + "x", origin=ORIGIN),
        httpx.post(f"{host.url}/v1/files/presign", headers={"origin": ORIGIN}, trust_env=False),
        client.post(f"/v1/files/{file}/complete", headers={"origin": ORIGIN}),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in client.get("/v1/files", headers={"origin": ORIGIN}).headers
    assert client.options("/v1/files", headers=asked).status_code == 405


def test_signatures_survive_rotation_of_keys() -> None:
    old, new = "b2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xkb2w=", "bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmU="
    ticket = Ticket(FileId("file-1"), OrganizationId("a&b=c"), 5, 100)
    query = Signer(Secrets(keys=(old,))).query(ticket)
    assert Signer(Secrets(keys=(new, old))).verify("file-1", query, 99) == ticket
    assert Signer(Secrets(keys=(new, old))).verify("file-1", query, 100) is None
    assert Signer(Secrets(keys=(new,))).verify("file-1", query, 99) is None
    assert Signer(Secrets(keys=(old,))).verify("file-2", query, 99) is None
