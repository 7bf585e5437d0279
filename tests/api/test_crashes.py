"""What is true after the API, its workers or the broker died at a bad moment."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from schemas.settings import Organization
from tests.api.conftest import api_settings
from tests.api.host import ACME, Facts, Host, create, error, jsonl, order, record, stored, upload
from tests.support.broker import EmbeddedBroker
from tests.support.pipeline import until


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    running = EmbeddedBroker(tmp_path_factory.mktemp("api-crash-kafka"))
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def own_broker(module_broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    """A broker these tests may stop without harming others; the next test finds it running."""
    yield module_broker
    if module_broker.child is None:
        module_broker.start()
    module_broker.resume()


@pytest.fixture
def mortal(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Host]:
    """An API whose caller has nothing yet."""
    caller = Organization(id=f"org-{secrets.token_hex(8)}", features=("batch", "workflows"), api_keys=(ACME,))
    running = Host(tmp_path, api_settings(own_broker, tmp_path, organizations=(caller,))).start()
    try:
        yield running
    finally:
        running.kill()


def objects(host: Host) -> set[str]:
    root = Path(host.settings.storage.url.removeprefix("file://"))
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_killed_in_the_middle_of_an_upload(mortal: Host) -> None:
    content = jsonl([record(str(each), pad="x" * 100_000) for each in range(100)])
    before = objects(mortal)
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    ) + content

    def left() -> set[str]:
        return objects(mortal) - before

    def half() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        until(lambda: any(name.startswith(".tmp/") for name in left()), 60, "a temporary file")
        mortal.kill()
        yield body[len(body) // 2 :]

    with mortal.client() as client, pytest.raises(httpx.TransportError):
        client.post("/v1/files", content=half(), headers={"content-type": "multipart/form-data; boundary=b"})
    assert len(left()) == 1
    mortal.start()
    assert left() == set()
    with mortal.client() as client:
        assert client.get("/v1/files").json()["data"] == []
        file = stored(client, content)
        assert client.get(f"/v1/files/{file}/content").content == content
    mortal.check_log()


def test_killed_in_the_middle_of_creates(mortal: Host) -> None:
    """Whatever the instant, a repeat with the same key gives one batch, which is whole."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    records = [record(str(each), pad="x" * 500) for each in range(3_000)]
    with mortal.client() as client:
        file = stored(client, jsonl([*records, b"bad"]))
        started = time.monotonic()
        create(client, input_file_id=file)
        usual_s = time.monotonic() - started
    made: dict[str, str] = {}
    for attempt in range(8):
        key = f"key-{attempt}"
        killer = threading.Timer(chance.uniform(0, usual_s), mortal.kill)
        inline = {"requests": records} if attempt % 2 else {"input_file_id": file}
        body = json.dumps(order(**inline)).encode()

        def send(body: bytes = body, key: str = key) -> httpx.Response:
            with mortal.client() as client:
                return client.post("/v1/batches", content=body, headers={"Idempotency-Key": key})

        answered = None
        killer.start()
        with contextlib.suppress(httpx.TransportError):
            answered = send().json()["id"]
        killer.join()
        mortal.start()
        again = send()
        assert again.status_code == 200, again.text
        made[key] = again.json()["id"]
        assert answered in (None, made[key])
    with mortal.client() as client:
        listed = [each["id"] for each in client.get("/v1/batches?limit=100").json()["data"]]
        assert len(listed) == len(set(listed)) == len(made) + 1
        assert set(made.values()) <= set(listed)
        for key, batch in made.items():

            def shown(batch: str = batch) -> dict[str, Any]:
                answer: dict[str, Any] = client.get(f"/v1/batches/{batch}").json()
                return answer

            until(lambda shown=shown: shown()["status"] == "in_progress", 30, "intake")  # type: ignore[misc]
            inline_one = int(key[-1]) % 2
            assert shown()["request_counts"]["total"] == (3_000 if inline_one else 3_001)
            assert client.get(f"/v1/files/{shown()['input_file_id']}").status_code == 200
    mortal.check_log()


@pytest.mark.faults
def test_the_broker_is_down(mortal: Host, own_broker: EmbeddedBroker) -> None:
    with mortal.client() as client:
        file = stored(client)
        batch = create(client, input_file_id=file)["id"]
        before = objects(mortal)
        own_broker.kill()
        calls = [
            lambda: client.post("/v1/batches", json=order()),
            lambda: client.post("/v1/batches", json=order(input_file_id=file)),
            lambda: client.get(f"/v1/batches/{batch}"),
            lambda: client.get("/v1/batches"),
            lambda: client.get(f"/v1/files/{file}"),
            lambda: client.post(f"/v1/batches/{batch}/cancel"),
            lambda: client.delete(f"/v1/files/{file}"),
        ]
        with ThreadPoolExecutor(len(calls)) as callers:
            for answer in callers.map(lambda call: call(), calls):
                assert answer.status_code == 503
                assert error(answer)["code"] == "unavailable"
                assert 0 < int(answer.headers["retry-after"]) <= 60
                assert answer.elapsed.total_seconds() < 40
        answer = upload(client, jsonl([record("a")]))
        assert answer.status_code == 503
        assert client.get("/v1/models").status_code == 200
        own_broker.start()
        until(lambda: client.get(f"/v1/batches/{batch}").status_code == 200, 30, "the broker's return")
        assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [batch]
        assert client.get(f"/v1/batches/{batch}").json()["cancelling_at"] is None
        assert client.get(f"/v1/files/{file}").status_code == 200
        left = {name for name in objects(mortal) - before if name.startswith("batches/")}
        assert left == set()
        create(client)


@pytest.mark.parametrize(("point", "again"), [("api.putting", 200), ("api.put", 409)])
def test_killed_at_the_end_of_a_put(mortal: Host, point: str, again: int) -> None:
    """Before the log knows of it the URL is unused, afterwards it is used and the file can be completed."""
    mortal.stop()
    mortal.start(OPENRELAY_CRASH_AT=f"{point}:1")
    content = jsonl([record("a")])
    with mortal.client() as client:
        ticket = client.post("/v1/files/presign", json={"bytes": len(content)}).json()
        with pytest.raises(httpx.TransportError):
            client.put(ticket["put_url"], content=content)
        mortal.kill()
        mortal.start()
        assert client.put(ticket["put_url"], content=content).status_code == again
        client.post(f"/v1/files/{ticket['file_id']}/complete").raise_for_status()
        assert client.get(f"/v1/files/{ticket['file_id']}/content").content == content
        create(client, input_file_id=ticket["file_id"])
    mortal.check_log()


def test_a_put_whose_acknowledgement_does_not_come(mortal: Host, own_broker: EmbeddedBroker) -> None:
    """Its client is told 503; what it sent stays, since the log may know of it by and by."""
    mortal.stop()
    mortal.start(OPENRELAY_CRASH_AT="api.putting~1")
    assert mortal.child is not None
    api = psutil.Process(mortal.child.pid)
    content = jsonl([record("a")])
    with mortal.client() as client, ThreadPoolExecutor(1) as thread:
        ticket = client.post("/v1/files/presign", json={"bytes": len(content)}).json()
        sending = thread.submit(client.put, ticket["put_url"], content=content)
        until(lambda: api.status() == psutil.STATUS_STOPPED, 60, "the moment before")
        own_broker.pause()
        api.resume()
        assert sending.result().status_code == 503
        own_broker.resume()
        path = f"/v1/files/{ticket['file_id']}/complete"
        until(lambda: client.post(path).status_code == 200, 60, "the file")
        assert client.put(ticket["put_url"], content=content).status_code == 409
        assert client.get(f"/v1/files/{ticket['file_id']}/content").content == content


def test_an_acknowledgement_that_does_not_come(mortal: Host, own_broker: EmbeddedBroker) -> None:
    """The broker stops just before the batch is created: it is withdrawn, though its fact lands later."""
    mortal.stop()
    mortal.start(OPENRELAY_CRASH_AT="api.creating~2")
    assert mortal.child is not None
    api = psutil.Process(mortal.child.pid)
    with mortal.client() as client:
        small = create(client)["id"]
        file = stored(client)
        answers: list[httpx.Response] = []
        body = order(input_file_id=file)
        headers = {"Idempotency-Key": "k"}

        def send() -> None:
            answers.append(client.post("/v1/batches", json=body, headers=headers))

        sending = threading.Thread(target=send)
        sending.start()
        until(lambda: api.status() == psutil.STATUS_STOPPED, 60, "the moment before")
        own_broker.pause()
        api.resume()
        sending.join()
        assert answers[0].status_code == 503
        own_broker.resume()
        until(lambda: "withdrew batch_" in mortal.log.read_text("utf-8"), 60, "the withdrawal")
        # The broker's pause has cost the process its membership, so that it is about to be started anew.
        mortal.kill()
        mortal.start()
        assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [small]
        send()
        assert answers[1].status_code == 200
        listed = [each["id"] for each in client.get("/v1/batches").json()["data"]]
        assert listed == [answers[1].json()["id"], small]


def test_draining(mortal: Host) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n'
    rest = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    stopped: list[int] = []
    stopping = threading.Thread(target=lambda: stopped.append(mortal.stop()))

    def slow() -> Iterator[bytes]:
        yield body
        stopping.start()
        time.sleep(1.5)
        yield rest

    with mortal.client() as client:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = client.post("/v1/files", content=slow(), headers=kind)
        assert answer.status_code == 200
        stopping.join()
        assert stopped == [0]
    mortal.start()
    with mortal.client() as client:
        assert client.get(f"/v1/files/{answer.json()['id']}").status_code == 200


def workers(host: Host) -> list[psutil.Process]:
    assert host.child is not None
    children = psutil.Process(host.child.pid).children()
    return [child for child in children if "services.api.checker" in child.cmdline()]


def test_workers_end_with_the_process_even_in_the_middle_of_a_job(mortal: Host) -> None:
    line = b'{"custom_id":"a","x":[' + b"[]," * 3_000_000 + b"1]}\n"
    with mortal.client() as client:
        file = stored(client, line * 10)
        sending = threading.Thread(target=_ignoring, args=(client, order(input_file_id=file)))
        sending.start()
        (worker,) = until(lambda: workers(mortal), 60, "a worker")
        until(lambda: worker.cpu_percent(0.1) > 5, 60, "the job")
        mortal.kill()
        sending.join()
        worker.wait(5)


def test_a_worker_that_dies_costs_one_answer(mortal: Host) -> None:
    line = b'{"custom_id":"a","x":[' + b"[]," * 3_000_000 + b"1]}\n"
    with mortal.client() as client:
        file = stored(client, line * 10)
        answers: list[httpx.Response] = []
        sending = threading.Thread(
            target=lambda: answers.append(client.post("/v1/batches", json=order(input_file_id=file)))
        )
        sending.start()
        (worker,) = until(lambda: workers(mortal), 60, "a worker")
        until(lambda: worker.cpu_percent(0.1) > 5, 60, "the job")
        worker.kill()
        sending.join()
        assert answers[0].status_code == 503
        assert client.get("/v1/batches").json()["data"] == []
        create(client)
    mortal.expected.add("validation worker ended within a job")
    mortal.check_log()


def _ignoring(client: httpx.Client, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.TransportError):
        client.post("/v1/batches", json=body)


@pytest.mark.parametrize("harm", ["deleted", "damaged", "foreign", "old", "empty"])
def test_the_read_model_is_rebuilt(mortal: Host, harm: str) -> None:
    facts = Facts(mortal.settings)
    with mortal.client() as client:
        file = stored(client)
        batch = create(client, input_file_id=file)["id"]
        until(lambda: client.get(f"/v1/batches/{batch}").json()["in_progress_at"], 20, "intake")
        facts.finish(batch)
        deleted = stored(client)
        client.delete(f"/v1/files/{deleted}").raise_for_status()
        before = [client.get(path).json() for path in ("/v1/batches", "/v1/files", f"/v1/batches/{batch}")]
    facts.close()
    assert mortal.stop() == 0
    path = Path(mortal.settings.data_dir) / "api" / "readmodel-0.sqlite"
    assert path.exists()
    if harm == "deleted":
        path.unlink()
    elif harm == "damaged":
        path.write_bytes(path.read_bytes()[:4096] + random.randbytes(20_000))
    elif harm == "empty":
        path.write_bytes(b"")
    else:
        connection = sqlite3.connect(path)
        name, value = ("cluster", "other") if harm == "foreign" else ("applied_at", "1.5")
        connection.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))
        connection.execute("UPDATE batches SET alive = 0")
        connection.commit()
        connection.close()
    mortal.start()
    with mortal.client() as client:
        after = [client.get(path).json() for path in ("/v1/batches", "/v1/files", f"/v1/batches/{batch}")]
    assert after == before
    mortal.check_log()


def test_two_instances_show_the_same(mortal: Host, tmp_path: Path) -> None:
    other = Host(tmp_path / "other", mortal.settings).start()
    try:
        with mortal.client() as one, other.client() as two:
            for number in range(10):
                file = stored(one if number % 2 else two)
                assert (two if number % 2 else one).get(f"/v1/files/{file}").status_code == 200
                batch = create(two if number % 2 else one, input_file_id=file)["id"]
                assert (one if number % 2 else two).get(f"/v1/batches/{batch}").status_code == 200
                seen = one.post(f"/v1/batches/{batch}/cancel").json()["cancelling_at"]
                assert two.get(f"/v1/batches/{batch}").json()["cancelling_at"] == seen
            key = {"Idempotency-Key": "k"}
            first = one.post("/v1/batches", json=order(), headers=key).json()["id"]
            assert two.post("/v1/batches", json=order(), headers=key).json()["id"] == first
            conflict = two.post("/v1/batches", json=order(metadata={"a": "b"}), headers=key)
            assert conflict.status_code == 409
        other.check_log()
        mortal.check_log()
    finally:
        other.kill()


def test_a_create_and_a_delete_on_two_instances_at_once(mortal: Host, tmp_path: Path) -> None:
    """One of them succeeds, whichever was first, and the other says so."""
    other = Host(tmp_path / "other", mortal.settings).start()
    content = jsonl([record(str(each)) for each in range(2_000)])
    outcomes = set()
    try:
        with mortal.client() as one, other.client() as two, ThreadPoolExecutor(1) as thread:
            for number in range(24):
                file = stored(one, content)
                begun = threading.Event()

                def send(file: str = file, begun: threading.Event = begun) -> httpx.Response:
                    begun.set()
                    return one.post("/v1/batches", json=order(input_file_id=file))

                creating = thread.submit(send)
                begun.wait(10)
                time.sleep(number * 0.003)  # the point at which the delete meets the create is what is varied
                deleted, created = two.delete(f"/v1/files/{file}"), creating.result()
                outcomes.add((created.status_code, deleted.status_code))
                if deleted.status_code == 409:
                    assert error(deleted)["code"] == "file_in_use"
                    assert created.json()["id"] in error(deleted)["message"]
        assert outcomes <= {(200, 409), (404, 200)}
        assert (200, 409) in outcomes
        other.check_log()
        mortal.check_log()
    finally:
        other.kill()


def test_creates_with_one_key_on_two_instances_at_once(mortal: Host, tmp_path: Path) -> None:
    other = Host(tmp_path / "other", mortal.settings).start()
    try:
        for number in range(6):
            answers: list[httpx.Response] = []

            def send(host: Host, number: int, body: dict[str, Any], into: list[httpx.Response]) -> None:
                with host.client() as client:
                    headers = {"Idempotency-Key": f"k{number}"}
                    into.append(client.post("/v1/batches", json=body, headers=headers))

            same = number % 2 == 0
            threads = [
                threading.Thread(
                    target=send,
                    args=(host, number, order(metadata={"n": "0" if same else str(place)}), answers),
                )
                for place, host in enumerate((mortal, other))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            good = {answer.json()["id"] for answer in answers if answer.status_code == 200}
            assert len(good) == 1
            with mortal.client() as client:
                input_file = client.get(f"/v1/batches/{good.pop()}").json()["input_file_id"]
                assert client.get(f"/v1/files/{input_file}").status_code == 200
                assert len(client.get("/v1/files").json()["data"]) == number + 1
            assert sorted(answer.status_code for answer in answers) == ([200, 200] if same else [200, 409])
        with mortal.client() as client:
            assert len(client.get("/v1/batches").json()["data"]) == 6
    finally:
        other.kill()
