"""What the hosts describe is what they do: nothing else is answered, nothing described is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from schemas.facts import KeyRole
from schemas.settings import ClickHouse, Limits
from services.warehouse.migrate import migrate
from tests.api.conftest import api_settings
from tests.api.host import ACME, RIVAL, Facts, Host
from tests.api.search import SENDING, Found, search
from tests.support.broker import EmbeddedBroker
from tests.support.control import ControlHost
from tests.support.warehouse import EmbeddedWarehouse

KEYS = {"acme": ACME, "rival": RIVAL}
LIMITS = Limits(max_file_bytes=100_000, max_records=20)
"""Small, so that what is too large is within reach."""
WAYS = {
    ("createBatch", "listBatches", "getBatch", "cancelBatch"): {
        ("POST /v1/batches", "GetBatch"),
        ("POST /v1/batches", "CancelBatch"),
        ("GET /v1/batches/{batch}", "CancelBatch"),
        ("POST /v1/batches/{batch}/cancel", "GetBatch"),
        ("GET /v1/batches", "Next"),
    },
    ("createFile", "listFiles", "getFile", "getFileContent", "deleteFile", "createBatch"): {
        ("POST /v1/files", "GetFile"),
        ("POST /v1/files", "GetFileContent"),
        ("POST /v1/files", "DeleteFile"),
        ("POST /v1/files", "CreateBatch"),
    },
    ("presignFile", "putFile", "completeFile", "getFile", "deleteFile"): {
        ("POST /v1/files/presign", "PutFile"),
        ("PUT /v1/uploads/{file}", "Complete"),
        ("POST /v1/files/{file}/complete", "GetFile"),
        ("POST /v1/files/{file}/complete", "DeleteFile"),
    },
}
"""Operations, and the links among them that a search must have followed."""
FAULTY = ("/v1/models", "/v1/models/{model}", "/v1/files", "/v1/batches", "/openapi.json", "/health")


@pytest.fixture(scope="module")
def small(api_broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("described")
    with Host(directory, api_settings(api_broker, directory, limits=LIMITS)) as running:
        yield running


@pytest.fixture(scope="module")
def control(
    api_broker: EmbeddedBroker, warehouse: EmbeddedWarehouse, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlHost]:
    directory = tmp_path_factory.mktemp("control")
    client = warehouse.client()
    client.command("DROP DATABASE IF EXISTS billing SYNC")
    migrate(client)
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    row = {"org_id": "acme", "batch_id": "batch_1", "request_index": 0, "kind": "usage", "completed_at": now}
    client.insert("billing.usage_events", [list(row.values())], column_names=list(row))
    client.close()
    served = api_settings(api_broker, directory, clickhouse=ClickHouse(url=warehouse.url))
    running = ControlHost(directory, served)
    running.start()
    try:
        yield running
    finally:
        running.stop()
    assert '"level": "error"' not in running.log.read_text("utf-8")


@pytest.fixture(scope="module")
def operator(control: ControlHost) -> Iterator[str]:
    facts = Facts(control.settings)
    try:
        yield facts.issue("acme", KeyRole.OPERATOR)
    finally:
        facts.close()


def _labels(url: str) -> set[str]:
    """Operations; the one that led to the others is not asked again."""
    paths = httpx.get(f"{url}/openapi.json", trust_env=False).json()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} - {
        "GET /openapi.json"
    }


def _complete(found: Found) -> None:
    assert found.status == 0, found.text
    assert found.report["complete"], found.text
    assert not found.report["failures"], found.text
    assert not found.report["errors"], found.text


def test_the_inference_host_is_as_described(small: Host, tmp_path: Path) -> None:
    found = search(small.url, tmp_path, KEYS, examples=10)
    _complete(found)
    # A URL to PUT to is only had by following a link.
    assert found.accepted == _labels(small.url) - {"PUT /v1/uploads/{file}"}


@pytest.mark.parametrize("operations", WAYS, ids=["batches", "files", "presigned"])
def test_what_follows_an_answer_is_as_described(
    small: Host, tmp_path: Path, operations: tuple[str, ...]
) -> None:
    found = search(small.url, tmp_path, KEYS, examples=10, phases="stateful", operations=operations)
    _complete(found)
    assert found.followed >= WAYS[operations], (WAYS[operations] - found.followed, found.text)


def test_the_control_host_is_as_described(control: ControlHost, operator: str, tmp_path: Path) -> None:
    found = search(control.url, tmp_path, {"acme": operator}, examples=5)
    _complete(found)
    assert found.accepted == _labels(control.url)


@pytest.mark.faults
@pytest.mark.timeout(1_800)
def test_a_long_search_finds_nothing_else(
    small: Host, control: ControlHost, operator: str, tmp_path: Path
) -> None:
    """The same each time, or, with `--hypothesis-profile=long`, other and more."""
    same = settings.default.derandomize
    times = 10 if same else 50
    for name, url, keys, examples, phases in (
        ("inference", small.url, KEYS, 6, SENDING),
        ("links", small.url, KEYS, 20, "stateful"),
        ("control", control.url, {"acme": operator}, 1, SENDING),
    ):
        directory = tmp_path / name
        _complete(search(url, directory, keys, examples=examples * times, repeatable=same, phases=phases))


def test_a_description_that_is_wrong_is_found_out(small: Host, tmp_path: Path) -> None:
    """One fault of each kind, each at another operation."""
    document: dict[str, Any] = httpx.get(f"{small.url}/openapi.json", trust_env=False).json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    get = {path: methods["get"] for path, methods in paths.items() if "get" in methods}
    del get["/v1/models/{model}"]["responses"]["404"]
    schemas["ModelList"]["properties"]["data"]["items"] = {"type": "string"}
    get["/v1/files"]["responses"]["200"]["headers"]["x-request-id"]["schema"]["pattern"] = "^id"
    get["/v1/files"]["parameters"][0]["schema"] |= {"minimum": 0}
    get["/v1/batches"]["parameters"][0]["schema"] |= {"maximum": 50}
    get["/openapi.json"]["security"] = [{"bearer": []}]
    get["/health"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    document["paths"] = {path: {"get": get[path]} for path in FAULTY}
    found = search(small.url, tmp_path, KEYS, examples=5, document=document, phases="coverage")
    assert found.status == 1
    assert found.kinds >= {
        ("UndefinedStatusCode", "GET /v1/models/{model}"),
        ("JsonSchemaError", "GET /v1/models"),
        ("JsonSchemaError", "GET /v1/files"),
        ("RejectedPositiveData", "GET /v1/files"),
        ("AcceptedNegativeData", "GET /v1/batches"),
        ("IgnoredAuth", "GET /openapi.json"),
        ("UndefinedContentType", "GET /health"),
    }, found.text
