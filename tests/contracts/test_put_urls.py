"""URLs of a bucket, before a server that checks them, and by whose credentials they are signed."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import msgspec
import pytest

from schemas.settings import Storage
from streams.blobs import Blobs, PutUrls, open_blobs
from tests.support.s3 import new_bucket, strict_s3_server

NAME = "arrivals/file-1.x.5"
KEY = {"access_key_id": "KEYOFTEST", "secret_access_key": "secret"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with strict_s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def storage(endpoint: str) -> Storage:
    return new_bucket(endpoint)


@pytest.fixture
def blobs(storage: Storage) -> Blobs:
    return open_blobs(storage)


def put(url: str, content: object = b"hello", **headers: str) -> int:
    return httpx.put(url, content=content, headers=headers, trust_env=False).status_code  # type: ignore[arg-type]


def test_curl_needs_no_more_than_the_url(storage: Storage, blobs: Blobs, tmp_path: Path) -> None:
    url = PutUrls(storage).sign(NAME, 5, 60)
    (tmp_path / "five").write_bytes(b"hello")
    (tmp_path / "six").write_bytes(b"hello!")
    for file, status in (("six", "403"), ("five", "200"), ("six", "403")):
        command = ("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-T", str(tmp_path / file), url)
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == status
    assert blobs.read(NAME) == b"hello"


def test_the_url_is_for_one_object_of_one_size(storage: Storage, blobs: Blobs) -> None:
    url = PutUrls(storage).sign(NAME, 5, 60)
    changed = [
        url.replace("file-1", "file-2"),
        url.replace("X-Amz-Expires=60", "X-Amz-Expires=61"),
        url.replace("content-length%3Bhost", "host"),
        url.replace(quote(storage.options["access_key_id"]), "another"),
        url[:-1] + ("1" if url[-1] == "0" else "0"),
        url.partition("?")[0],
    ]
    assert {put(each) for each in changed} == {403}
    assert put(url, b"hell") == 403
    assert put(url, iter([b"hello"])) == 403
    for method in ("GET", "HEAD", "DELETE"):
        assert httpx.request(method, url, trust_env=False).status_code == 403
    assert blobs.list("") == []
    assert put(url) == 200
    assert blobs.list("") == [NAME]


def test_the_url_ends(storage: Storage, blobs: Blobs) -> None:
    url = PutUrls(storage).sign(NAME, 5, 1)
    end = time.time() + 2
    while time.time() < end:
        time.sleep(0.05)
    assert put(url) == 403
    assert blobs.list("") == []


def test_a_prefix_with_unusual_characters(storage: Storage) -> None:
    """Two readers could write such a path in two ways, and sign another one each."""
    odd = msgspec.structs.replace(storage, url=storage.url + "/a b+c=d@e~f'(g)!é")
    assert put(PutUrls(odd).sign(NAME, 5, 60)) == 200
    assert open_blobs(odd).read(NAME) == b"hello"


def signed_by(url: str) -> tuple[str, str | None]:
    """Access key and session token."""
    fields = parse_qs(urlsplit(url).query)
    token = fields.get("X-Amz-Security-Token")
    return fields["X-Amz-Credential"][0].split("/")[0], None if token is None else token[0]


def test_the_region_and_place_are_those_of_the_store() -> None:
    virtual = {"region": "eu-central-1", "virtual_hosted_style_request": "true"}
    url = urlsplit(PutUrls(Storage(url="s3://bucket/p", options=KEY | virtual)).sign(NAME, 5, 60))
    assert (url.hostname, url.path) == ("bucket.s3.eu-central-1.amazonaws.com", f"/p/{NAME}")
    assert "/eu-central-1/s3/" in parse_qs(url.query)["X-Amz-Credential"][0]


def test_settings_come_before_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", "KEYOFENVIRONMENT")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "other")
    storage = Storage(url="s3://bucket", options={f"aws_{name}": value for name, value in KEY.items()})
    assert signed_by(PutUrls(storage).sign(NAME, 5, 60)) == ("KEYOFTEST", None)


@pytest.mark.parametrize("token", [None, "token"])
def test_credentials_of_the_environment(environment: pytest.MonkeyPatch, token: str | None) -> None:
    environment.setenv("AWS_ACCESS_KEY_ID", "KEYOFENVIRONMENT")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "other")
    if token is not None:
        environment.setenv("AWS_SESSION_TOKEN", token)
    assert signed_by(PutUrls(Storage(url="s3://bucket")).sign(NAME, 5, 60)) == ("KEYOFENVIRONMENT", token)


def test_profiles_are_not_looked_for(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The store's client does not know them; it would be another identity, or none."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    environment.setenv("AWS_PROFILE", "default")
    with pytest.raises(ValueError, match="no credentials"):
        PutUrls(Storage(url="s3://bucket"))


def test_credentials_of_a_container(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "AccessKeyId": "KEYOFROLE",
        "SecretAccessKey": "secret",
        "Token": "token",
        "Expiration": "2126-01-01T00:00:00Z",
        "AccountId": "1",
    }

    class Role(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(given).encode())

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "token").write_text("x")
    with ThreadingHTTPServer(("127.0.0.1", 0), Role) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            environment.setenv(
                "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/"
            )
            environment.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
            storage = Storage(url="s3://bucket", options={"allow_http": "true"})
            assert signed_by(PutUrls(storage).sign(NAME, 5, 60)) == ("KEYOFROLE", "token")
        finally:
            server.shutdown()


def test_half_of_the_credentials_is_a_fault_at_the_start(environment: pytest.MonkeyPatch) -> None:
    """The store's client takes the other half from the environment; whose they are then, nobody can say."""
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(ValueError, match="no credentials"):
        PutUrls(Storage(url="s3://bucket", options={"access_key_id": "a"}))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One without credentials."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
