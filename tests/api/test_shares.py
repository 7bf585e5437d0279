"""What one organization does at once leaves room for the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from schemas.settings import Limits
from tests.api.conftest import api_settings
from tests.api.host import ACME, CHAT, RIVAL, Host, error, jsonl, order, record, stored, upload
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until

SLOTS = 4


@pytest.fixture
def shared(api_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Host]:
    settings = api_settings(api_broker, tmp_path, limits=Limits(max_concurrent_uploads=SLOTS))
    with Host(tmp_path, settings) as running:
        yield running


def test_slow_uploads_leave_places_to_others(shared: Host) -> None:
    """Multipart uploads, PUTs to signed URLs and creates in chunks: whatever takes a place."""
    began, go_on = threading.Barrier(SLOTS), threading.Event()
    content, body = jsonl([record("a")]), json.dumps(order()).encode()

    def slow() -> Iterator[bytes]:
        yield body[:10]
        began.wait(10)
        assert go_on.wait(20)
        yield body[10:]

    def create(key: str, content: Iterator[bytes]) -> httpx.Response:
        with shared.client(key) as client:
            return client.post("/v1/batches", content=content)

    def put(client: httpx.Client) -> httpx.Response:
        ticket = client.post("/v1/files/presign", json={"bytes": len(content)}).raise_for_status().json()
        return httpx.put(ticket["put_url"], content=content, trust_env=False)

    with (
        ThreadPoolExecutor(SLOTS - 1) as threads,
        shared.client(ACME) as acme,
        shared.client(RIVAL) as rival,
    ):
        running = [threads.submit(create, ACME, slow()) for _ in range(SLOTS - 1)]
        try:
            began.wait(10)
            until(lambda: upload(acme, content).status_code == 429, 10, "429")
            for refused in (put(acme), create(ACME, iter([body]))):
                assert (refused.status_code, error(refused)["code"]) == (429, "too_many_uploads")
            for welcome in (upload(rival, content), put(rival), create(RIVAL, iter([body]))):
                assert welcome.status_code == 200
        finally:
            go_on.set()
        assert {each.result().status_code for each in running} == {200}
        assert upload(acme, content).status_code == 200


def test_checks_of_another_do_not_wait_for_those_of_one(shared: Host) -> None:
    keys = b",".join(b'"%d":0' % number for number in range(600_000))
    heavy = b'{"custom_id":"a","method":"POST","url":"%s","body":{"model":"m","x":{%s}}}\n' % (
        CHAT.encode(),
        keys,
    )
    waiting = 4
    root = Path(shared.settings.storage.url.removeprefix("file://"))

    def inputs() -> int:
        return len(list((root / "batches").glob("*/input-*")))

    with ThreadPoolExecutor(waiting) as threads, shared.client(ACME) as acme, shared.client(RIVAL) as rival:
        file, light = stored(acme, heavy * 4), stored(rival)
        before = inputs()
        orders = [order(input_file_id=file, metadata={"number": str(each)}) for each in range(waiting)]
        running = [threads.submit(acme.post, "/v1/batches", json=each) for each in orders]
        until(lambda: inputs() >= before + waiting, 20, "all wait to be checked")
        assert rival.post("/v1/batches", json=order(input_file_id=light)).status_code == 200
        assert not any(each.done() for each in running)
        assert {each.result().status_code for each in running} == {200}
