"""The same API with a bucket behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streams.blobs import open_blobs
from tests.api.conftest import api_settings
from tests.api.host import Host, create, jsonl, order, record, stored
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until
from tests.support.s3 import new_bucket, s3_server


@pytest.fixture
def on_s3(tmp_path: Path) -> Iterator[Host]:
    broker = EmbeddedBroker(tmp_path)
    broker.start()
    try:
        with s3_server() as endpoint:
            settings = api_settings(broker, tmp_path, storage=new_bucket(endpoint))
            with Host(tmp_path, settings) as running:
                yield running
    finally:
        broker.stop()


def test_the_whole_way(on_s3: Host) -> None:
    content = jsonl([record(str(each), pad="x" * 20_000) for each in range(1_000)])
    with on_s3.client() as client:
        file = stored(client, content)
        assert client.get(f"/v1/files/{file}/content").content == content
        part = client.get(f"/v1/files/{file}/content", headers={"range": "bytes=5000000-5000999"})
        assert part.content == content[5_000_000:5_001_000]
        batch = create(client, input_file_id=file)
        inline = create(client, requests=[{"custom_id": "a", "body": {"model": "m"}}, 7])
        assert [each["code"] for each in inline["errors"]["data"]] == ["invalid_record"]
        for each in (batch, inline):
            path = f"/v1/batches/{each['id']}"
            until(lambda path=path: client.get(path).json()["in_progress_at"], 30, "intake")  # type: ignore[misc]
        ticket = client.post("/v1/files/presign", json={"bytes": len(content)}).json()
        assert client.post(f"/v1/files/{ticket['file_id']}/complete").status_code == 400
        httpx.put(ticket["put_url"], content=content, trust_env=False).raise_for_status()
        client.post(f"/v1/files/{ticket['file_id']}/complete").raise_for_status()
        assert client.get(f"/v1/files/{ticket['file_id']}/content").content == content
        client.delete(f"/v1/files/{ticket['file_id']}").raise_for_status()
        assert client.get(f"/v1/files/{ticket['file_id']}/content").status_code == 404
        assert client.post("/v1/batches", json=order(requests=[])).status_code == 400
    names = open_blobs(on_s3.settings.storage).list("")
    assert not [name for name in names if name.startswith("pending/")]
