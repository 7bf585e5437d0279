"""The description says what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.host import IDLE, Host
from tests.api.test_access import ROUTES


@pytest.fixture
def idle(host: Host) -> Iterator[httpx.Client]:
    with host.client(IDLE) as client:
        yield client


def test_it_is_served_to_anyone(host: Host) -> None:
    answer = httpx.get(f"{host.url}/openapi.json", trust_env=False)
    assert answer.status_code == 200
    assert answer.json()["openapi"] == "3.1.0"


def test_every_reference_leads_somewhere(host: Host) -> None:
    document = httpx.get(f"{host.url}/openapi.json", trust_env=False)
    names = set(document.json()["components"]["schemas"])
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', document.text)) <= names
    assert {"File", "Batch", "ErrorBody"} <= names


def test_paths_are_those_of_the_router(host: Host, client: httpx.Client) -> None:
    described = {
        (method.upper(), path)
        for path, operations in httpx.get(f"{host.url}/openapi.json", trust_env=False).json()["paths"].items()
        for method in operations
    }
    assert set(ROUTES) <= described
    for method, path in described:
        answer = client.request(method, re.sub(r"{\w+}", "x", path))
        assert answer.status_code not in (405, 500), (method, path)
        if "{" not in path:
            assert answer.status_code != 404, (method, path)


def test_what_may_be_answered_is_described(host: Host, idle: httpx.Client) -> None:
    """Without a key, and to a caller who has no batches."""
    paths = httpx.get(f"{host.url}/openapi.json", trust_env=False).json()["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            url = host.url + re.sub(r"{\w+}", "x", path)
            answers = httpx.request(method, url, trust_env=False), idle.request(method, url)
            for answer in answers:
                assert str(answer.status_code) in operation["responses"], (method, path, answer.status_code)
            assert {"400", "408", "431"} <= set(operation["responses"])
            assert ("401" in operation["responses"]) == ("security" not in operation)
            wrong = httpx.options(url, trust_env=False)
            assert wrong.status_code == (405 if "security" in operation else 401)


def test_objects_have_the_described_fields(host: Host, client: httpx.Client) -> None:
    schemas = httpx.get(f"{host.url}/openapi.json", trust_env=False).json()["components"]["schemas"]

    def fields(value: dict[str, Any], name: str) -> None:
        assert set(value) == set(schemas[name]["properties"])

    fields(client.get("/v1/models").json(), "ModelList")
    fields(client.get("/v1/files").json(), "FileList")
    fields(client.get("/v1/batches").json(), "BatchList")
    fields(client.get("/v1/batches/x").json(), "ErrorBody")
    fields(client.post("/v1/files/presign", json={"bytes": 1}).json(), "Presigned")
