"""The storage is full, and then it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from schemas.settings import Storage
from tests.api.conftest import api_settings
from tests.api.host import CHAT, Host, error
from tests.support.broker import EmbeddedBroker
from tests.support.disk import mounted

SIZE_MB = 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "blobs", SIZE_MB) as place:
        yield place


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def test_what_does_not_fit_is_refused_and_leaves_nothing(
    api_broker: EmbeddedBroker, small_disk: Path, tmp_path: Path
) -> None:
    settings = api_settings(api_broker, tmp_path / "api", storage=Storage(url=small_disk.as_uri()))
    host = Host(tmp_path / "api", settings)
    host.expected.add("the storage is full")
    host.start()
    line = b'{"custom_id": "a", "pad": "' + b"x" * 4_000_000 + b'"}\n'
    try:
        with host.client() as client:

            def refused(answer: httpx.Response) -> None:
                assert answer.status_code == 503, answer.text
                assert error(answer)["code"] == "unavailable"
                assert 0 < int(answer.headers["retry-after"]) <= 60

            def upload(data: bytes) -> httpx.Response:
                return client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)})

            refused(upload(line))
            requests = [{"custom_id": f"{i}", "body": {"model": "m", "x": "x" * 100_000}} for i in range(40)]
            body = {"endpoint": CHAT, "completion_window": "24h", "requests": requests}
            refused(client.post("/v1/batches", json=body))
            assert files(small_disk) == []
            assert upload(line[-1_000:]).status_code == 200
        assert host.stop() == 0
        host.check_log()
        assert host.log.read_text().count("the storage is full") == 2
    finally:
        host.kill()
