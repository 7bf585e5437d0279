"""A create sent more than once is one batch."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from schemas.facts import Withdrawn
from schemas.ids import BatchId, OrganizationId
from services.api.claims import scope_of
from tests.api.host import CHAT, Facts, Host, create, error, jsonl, order, record, stored


def post(
    client: httpx.Client, key: str | None = None, retries: int | None = None, **fields: Any
) -> httpx.Response:
    headers = {}
    if key is not None:
        headers["Idempotency-Key"] = key
    if retries is not None:
        headers["x-stainless-retry-count"] = str(retries)
    return client.post("/v1/batches", json=order(**fields), headers=headers)


def count(client: httpx.Client) -> int:
    return len(client.get("/v1/batches?limit=100").json()["data"])


def test_same_key_same_batch(fresh: httpx.Client) -> None:
    first = post(fresh, "k").json()
    second = post(fresh, "k")
    assert second.status_code == 200
    assert second.json()["id"] == first["id"]
    assert post(fresh, "other").json()["id"] != first["id"]
    assert post(fresh).json()["id"] != first["id"]
    assert count(fresh) == 3


def test_the_repeat_shows_the_batch_as_it_is_now_with_all_errors(fresh: httpx.Client, facts: Facts) -> None:
    file = stored(fresh, b"x\n" * 150 + jsonl([record("a")]))
    first = post(fresh, "k", input_file_id=file).json()
    facts.finish(first["id"])
    again = post(fresh, "k", input_file_id=file).json()
    assert again["status"] == "completed"
    assert again["output_file_id"] == f"file-{first['id']}-output"
    assert again["errors"] == first["errors"]
    assert len(again["errors"]["data"]) == 150


def test_no_key_of_one_organization_is_one_of_another() -> None:
    one = scope_of(OrganizationId("a"), "b:c", "0", 0)
    other = scope_of(OrganizationId("a:b"), "c", "0", 0)
    assert one.name != other.name


def test_another_body_is_a_conflict(fresh: httpx.Client) -> None:
    post(fresh, "k").raise_for_status()
    answer = post(fresh, "k", metadata={"a": "b"})
    assert answer.status_code == 409
    assert error(answer)["code"] == "idempotency_conflict"
    assert answer.headers["x-should-retry"] == "false"
    assert count(fresh) == 1


def test_keys_belong_to_an_organization(client: httpx.Client, rival: httpx.Client) -> None:
    key = f"k{time.monotonic_ns()}"
    assert post(client, key).json()["id"] != post(rival, key).json()["id"]


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_bad_keys(client: httpx.Client, key: str) -> None:
    answer = post(client, key)
    assert answer.status_code == 400
    assert error(answer)["param"] == "Idempotency-Key"


def test_the_longest_key(fresh: httpx.Client) -> None:
    key = "~" * 255
    assert post(fresh, key).json()["id"] == post(fresh, key).json()["id"]


def test_a_refusal_is_not_remembered(fresh: httpx.Client) -> None:
    unknown = "file-" + "0" * 32
    assert post(fresh, "k", input_file_id=unknown).status_code == 404
    assert post(fresh, "k", priority="x").status_code == 400
    first = post(fresh, "k")
    assert first.status_code == 200
    assert post(fresh, "k").json()["id"] == first.json()["id"]
    assert post(fresh, "k", input_file_id=unknown).status_code == 409


def test_ten_at_once(host: Host, fresh: httpx.Client) -> None:
    body = order(requests=[{"custom_id": str(each), "body": {"model": "m"}} for each in range(2_000)])

    def send(_: int) -> httpx.Response:
        return fresh.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"})

    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(send, range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert count(fresh) == 1
    assert len(fresh.get("/v1/files").json()["data"]) == 1
    assert host.child is not None


def test_ten_at_once_with_different_bodies(fresh: httpx.Client) -> None:
    def send(each: int) -> httpx.Response:
        return post(fresh, "k", metadata={"n": str(each % 2)})

    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(send, range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [409] * 5
    assert count(fresh) == 1


def test_sdk_retries_without_a_key(fresh: httpx.Client) -> None:
    first = post(fresh, retries=0).json()["id"]
    assert post(fresh, retries=1).json()["id"] == first
    assert post(fresh, retries=2).json()["id"] == first
    assert post(fresh, retries=1, metadata={"a": "b"}).json()["id"] != first
    assert post(fresh, retries=0).json()["id"] != first
    assert post(fresh).json()["id"] != first
    assert post(fresh, retries=1).json()["id"] == first
    assert count(fresh) == 4


def test_a_retry_while_the_first_is_at_it(fresh: httpx.Client) -> None:
    body = order(requests=[{"custom_id": str(each), "body": {"model": "m"}} for each in range(20_000)])

    def send(retries: int) -> str:
        headers = {"x-stainless-retry-count": str(retries)}
        return str(fresh.post("/v1/batches", json=body, headers=headers).json()["id"])

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(send, 0)
        time.sleep(0.15)
        others = [threads.submit(send, each) for each in (1, 2)]
        assert {each.result() for each in [first, *others]} == {first.result()}
    assert count(fresh) == 1


@pytest.mark.parametrize("header", ["x", "-1", "1.5", "", "9" * 50])
def test_odd_retry_counts_count_as_none(fresh: httpx.Client, header: str) -> None:
    for _ in range(2):
        fresh.post(
            "/v1/batches", json=order(), headers={"x-stainless-retry-count": header}
        ).raise_for_status()
    assert count(fresh) == 2


def test_a_withdrawn_batch_does_not_answer_for_its_key(fresh: httpx.Client, facts: Facts) -> None:
    first = post(fresh, "k").json()["id"]
    facts.append(Withdrawn(batch=BatchId(first)))
    second = post(fresh, "k").json()["id"]
    assert second != first
    assert post(fresh, "k").json()["id"] == second
    assert count(fresh) == 1


def test_the_answer_survives_a_restart(host: Host, fresh: httpx.Client) -> None:
    file = stored(fresh)
    first = post(fresh, "k", input_file_id=file).json()["id"]
    host.kill()
    host.start()
    assert post(fresh, "k", input_file_id=file).json()["id"] == first


def test_the_openai_sdk_retries_into_one_batch(host: Host, fresh: httpx.Client) -> None:
    """The first answer is lost on its way back; the SDK sends the request again."""
    key = fresh.headers["authorization"].removeprefix("Bearer ")
    lost = []

    class Losing(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            if request.url.path.endswith("/batches") and not lost:
                lost.append(json.loads(answer.read())["id"])
                raise httpx.ReadError("lost", request=request)
            return answer

    with httpx.Client(transport=Losing(), trust_env=False) as transport:
        sdk = openai.OpenAI(api_key=key, base_url=f"{host.url}/v1", http_client=transport, max_retries=3)
        batch = sdk.batches.create(input_file_id=stored(fresh), endpoint=CHAT, completion_window="24h")
    assert lost == [batch.id]
    assert count(fresh) == 1
    assert create(fresh)["id"] != batch.id
