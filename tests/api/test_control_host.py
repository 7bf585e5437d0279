"""The control host over HTTP, against a real broker and a real warehouse."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest
from starlette.routing import Route

from schemas.facts import KeyFact, KeyIssued, KeyRevoked, KeyRole
from schemas.ids import OrganizationId
from schemas.settings import Organization, Settings
from services.api import keys
from services.api.principals import Principals
from services.control import prices
from services.control.application import application, routes
from services.control.board import Board
from services.control.issued import IssuedKeys
from services.warehouse.migrate import migrate
from streams.kafka.admin import Admin, create_topics
from streams.kafka.messages import Message
from tests.support import facts
from tests.support.broker import EmbeddedBroker
from tests.support.settings import API_KEY, MODEL, ORGANIZATION, settings_for
from tests.support.warehouse import EmbeddedWarehouse

FINANCE_KEY = keys.make(bytes(range(24)))
REVOKED_KEY = keys.make(bytes(range(1, 25)))
OPERATOR_KEY = keys.make(bytes(range(2, 26)))
OTHER_KEY = "or_other_key_0123456789"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def _issued(key: str, role: KeyRole) -> KeyIssued:
    return KeyIssued(
        key_id=keys.key_id(key),
        sha256=keys.fingerprint(key),
        organization=OrganizationId(ORGANIZATION),
        role=role,
    )


def _messages(*facts: KeyFact) -> list[Message]:
    return [Message("keys", 0, n, 0, None, msgspec.json.encode(fact)) for n, fact in enumerate(facts)]


@pytest.fixture(scope="module")
def settings(
    broker: EmbeddedBroker, warehouse: EmbeddedWarehouse, tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    """Topics and tables are there, with some usage."""
    organizations = (
        Organization(id=ORGANIZATION, api_keys=(API_KEY,)),
        Organization(id="org_other", api_keys=(OTHER_KEY,)),
    )
    made = settings_for(
        tmp_path_factory.mktemp("control"),
        bootstrap=broker.bootstrap,
        warehouse_url=warehouse.url,
        organizations=organizations,
    )
    if not Admin(made.kafka, "test").partitions(["results"]):
        create_topics(made)
    client = warehouse.client()
    client.command("DROP DATABASE IF EXISTS billing SYNC")
    migrate(client)
    client.insert("billing.usage_events", _rows(), column_names=list(_COLUMNS))
    client.close()
    return made


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
async def http(settings: Settings, board: Board) -> AsyncIterator[httpx.AsyncClient]:
    issued = IssuedKeys()
    issued.apply(
        _messages(
            KeyRevoked(key_id=keys.key_id(REVOKED_KEY)),
            _issued(REVOKED_KEY, KeyRole.FINANCE),
            _issued(FINANCE_KEY, KeyRole.FINANCE),
            _issued(OPERATOR_KEY, KeyRole.OPERATOR),
        )
    )
    app = application(settings, Principals(settings.organizations, issued.find), board)
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as connected:
        yield connected


_COLUMNS: dict[str, Any] = {
    "org_id": ORGANIZATION,
    "billing_month": 202611,
    "batch_id": "batch_1",
    "request_index": 0,
    "entry_id": "usage",
    "kind": "usage",
    "model": "m1",
    "endpoint": "/v1/chat/completions",
    "tier": "standard",
    "api_key_id": "key_1",
    "completed_at": NOW,
    "input_tokens": 10,
    "cached_tokens": 4,
    "output_tokens": 20,
    "price_id": "price_1",
    "cost_input_nano": 100,
    "cost_output_nano": 200,
    "cost_nano_usd": 300,
    "output_offset": 0,
    "usage_topic": "usage",
    "usage_partition": 0,
    "usage_offset": 0,
}


def _rows() -> list[list[Any]]:
    rows = [_COLUMNS | {"request_index": n} for n in range(3)]
    rows.append(_COLUMNS | {"request_index": 0, "output_offset": 9, "input_tokens": 999})  # a later version
    rows.append(_COLUMNS | {"request_index": 3, "model": "m2", "completed_at": NOW.replace(day=21)})
    rows.append(_COLUMNS | {"org_id": "org_other", "batch_id": "batch_2"})
    return [list(row.values()) for row in rows]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_usage_is_the_callers_own(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/usage", headers=_bearer(API_KEY))
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("req_")
    one = {"requests": 1, "input_tokens": 10, "cached_tokens": 4, "output_tokens": 20, "cost_nano_usd": 300}
    assert answer.json() == {
        "object": "list",
        "data": [
            {"model": "m1", **{name: 3 * value for name, value in one.items()}},
            {"model": "m2", **one},
        ],
    }
    other = await http.get("/v1/usage", headers={"x-api-key": OTHER_KEY})
    assert other.json()["data"] == [{"model": "m1", **one}]


async def test_usage_by_day_and_within_days(http: httpx.AsyncClient) -> None:
    answer = await http.get(
        "/v1/usage?group_by=day,tier&start=2026-11-20&end=2026-11-20", headers=_bearer(API_KEY)
    )
    [row] = answer.json()["data"]
    assert (row["day"], row["tier"], row["requests"]) == ("2026-11-20", "standard", 3)
    none = await http.get("/v1/usage?batch=batch_2", headers=_bearer(API_KEY))
    assert none.json()["data"] == []


async def test_a_dimension_named_twice_counts_once(http: httpx.AsyncClient) -> None:
    once, twice = [
        await http.get(f"/v1/usage?group_by={query}", headers=_bearer(API_KEY))
        for query in ("model,day", "model,day,model")
    ]
    assert once.json() == twice.json()
    assert len(once.json()["data"]) > 1


async def test_finance_sees_every_organization(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/usage?group_by=organization", headers=_bearer(FINANCE_KEY))
    assert [(row["organization"], row["requests"]) for row in answer.json()["data"]] == [
        ("org_other", 1),
        (ORGANIZATION, 4),
    ]
    one = await http.get("/v1/usage?organization=org_other", headers=_bearer(FINANCE_KEY))
    assert one.json()["data"][0]["requests"] == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=colour", "group_by"),
        ("start=yesterday", "start"),
        ("end=2026-13-01", "end"),
        ("colour=red", "colour"),
        ("group_by=organization", "group_by"),
    ],
)
async def test_a_wrong_question_is_named(http: httpx.AsyncClient, query: str, param: str) -> None:
    answer = await http.get(f"/v1/usage?{query}", headers=_bearer(API_KEY))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_another_organization_is_nowhere(http: httpx.AsyncClient) -> None:
    foreign = await http.get("/v1/usage?organization=org_other", headers=_bearer(API_KEY))
    unknown = await http.get("/v1/usage?organization=org_none", headers=_bearer(API_KEY))
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.content == unknown.content


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Basic or_x"},
        {"Authorization": "Bearer "},
        _bearer("or_unknown_0123456789"),
        _bearer(REVOKED_KEY),
        _bearer(API_KEY[:-1]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/usage", "/v1/lag", "/v1/anything", "/"])
async def test_no_good_key_is_the_same_401_before_any_404(
    http: httpx.AsyncClient, headers: dict[str, str], path: str
) -> None:
    answer = await http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files",
        "/v1/batches",
        "/v1/files/file-1/content",
        "/v1/uploads/file-1?key=x",
        "/v1/chat/completions",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_inference_routes_are_404_before_any_key(
    http: httpx.AsyncClient, path: str, method: str
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_unknown_routes_and_methods_with_a_key(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/anything", headers=_bearer(API_KEY))).status_code == 404
    for path in ("/", "/v1/usage", "/v1/prices", "/v1/lag", "/v1/keys"):
        assert (await http.post(path)).status_code == 401
        answer = await http.post(path, headers=_bearer(API_KEY))
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for path in ("/health", "/metrics", "/openapi.json"):
        assert (await http.post(path)).status_code == 405


@pytest.mark.parametrize("path", ["/v1/usage/", "/v1/lag//", "//", "/health/", "/metrics/", "/openapi.json/"])
async def test_a_path_with_a_slash_more_is_another(http: httpx.AsyncClient, path: str) -> None:
    """Nobody is sent elsewhere, least of all to where the caller's Host points."""
    url = "http://control" + path
    for method in ("GET", "POST"):
        for headers, status in (({}, 401), (_bearer(API_KEY), 404)):
            answer = await http.request(method, url, headers=headers | {"Host": "elsewhere.example"})
            assert answer.status_code == status
            assert "location" not in answer.headers
            assert answer.headers["x-request-id"].startswith("req_")


async def test_a_fault_is_a_500_that_says_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Settings) -> None:
        raise ZeroDivisionError("secret-detail")

    monkeypatch.setattr(prices, "current", broken)
    app = application(settings, Principals(settings.organizations, lambda _: None), Board())
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://control") as http:
        answer = await http.get("/v1/prices", headers=_bearer(API_KEY))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret-detail" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("name", ["batch", "organization"])
@pytest.mark.parametrize(
    "value", ["%00", "%5C", "%09x%0A", "%27", "{x:String}", "%F0%9F%98%80", "x" * 50_000]
)
async def test_strange_names_have_no_usage(http: httpx.AsyncClient, name: str, value: str) -> None:
    answer = await http.get(f"/v1/usage?{name}={value}", headers=_bearer(FINANCE_KEY))
    assert (answer.status_code, answer.json().get("data")) == (200, []), answer.text


async def test_lag_and_metrics(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/lag", headers=_bearer(API_KEY))
    deadline = time.monotonic() + 30
    while answer.status_code == 503 and time.monotonic() < deadline:  # a new broker makes its offsets topic
        answer = await http.get("/v1/lag", headers=_bearer(API_KEY))
    found = {(row["group"], row["topic"]): row["lag"] for row in answer.json()["data"]}
    assert ("settle", "results") in found
    assert all(lag >= 0 for lag in found.values())
    metrics = (await http.get("/metrics")).text
    assert 'openrelay_lag_records{group="settle",partition="0",topic="results"}' in metrics
    assert (await http.get("/health")).text == "ok\n"


async def test_prices_are_those_of_the_settings(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/prices", headers=_bearer(API_KEY))
    standard, expedited = answer.json()["data"]
    assert (standard["tier"], standard["bps"]) == ("standard", 5_000)
    assert (expedited["tier"], expedited["bps"]) == ("expedited", 10_000)
    assert standard["model"] == MODEL
    assert standard["input_nano_usd_per_mtok"] == expedited["input_nano_usd_per_mtok"] == 150_000_000
    assert standard["price_id"] != expedited["price_id"]
    assert (await http.get("/v1/prices")).status_code == 401


def test_a_new_price_is_a_new_row(settings: Settings, warehouse: EmbeddedWarehouse) -> None:
    first = datetime(2026, 11, 1, tzinfo=UTC)
    assert prices.record(settings, first) == 2
    assert prices.record(settings, first + timedelta(days=1)) == 0
    model = msgspec.structs.replace(settings.models[MODEL], output_nano_usd_per_mtok=700_000_000)
    dearer = msgspec.structs.replace(settings, models={MODEL: model})
    assert prices.record(dearer, first + timedelta(days=2)) == 2
    assert prices.record(settings, first + timedelta(days=3)) == 2
    client = warehouse.client()
    rows = client.query(
        "SELECT output_nano_per_mtok FROM billing.prices WHERE tier = 'standard' ORDER BY valid_from"
    ).result_rows
    client.close()
    assert [row[0] for row in rows] == [600_000_000, 700_000_000, 600_000_000]


async def test_keys_are_for_operators(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/keys", headers=_bearer(OPERATOR_KEY))
    assert answer.status_code == 200
    configured = {row["id"]: row for row in answer.json()["data"]}[keys.key_id(API_KEY)]
    assert (configured["source"], configured["organization"]) == ("settings", ORGANIZATION)
    assert API_KEY not in answer.text
    for key in (API_KEY, FINANCE_KEY):
        assert (await http.get("/v1/keys", headers=_bearer(key))).status_code == 404


async def test_the_description_says_what_is_there(settings: Settings, http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert document["openapi"] == "3.1.0"
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()))
    assert named <= set(schemas)
    served = routes(settings, Board()).routes
    assert set(document["paths"]) == {route.path for route in served if isinstance(route, Route)}
    for path, operations in document["paths"].items():
        described = operations["get"]["responses"]
        assert {"400", "408", "431"} <= set(described)
        assert str((await http.get(path)).status_code) in described
        answer = await http.get(path, headers=_bearer(OPERATOR_KEY))
        assert str(answer.status_code) in described
        content = described["200"]["content"]
        assert answer.headers["content-type"].partition(";")[0] in content, path
        reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        if reference:
            schema = schemas[reference.rpartition("/")[2]]
            assert set(answer.json()) == set(schema["properties"])
            [item] = [
                schemas[name] for name in re.findall(r"schemas/(\w+)", str(schema["properties"]["data"]))
            ]
            for row in answer.json()["data"]:
                assert set(row) <= set(item["properties"])


async def test_the_dashboard_asks_browsers_for_a_key(http: httpx.AsyncClient) -> None:
    refused = await http.get("/")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    for wrong in ("Basic !!", "Basic " + base64.b64encode(b"x:or_wrong_key_0123456").decode()):
        assert (await http.get("/", headers={"Authorization": wrong})).status_code == 401
    for auth in (httpx.BasicAuth("anybody", OPERATOR_KEY), httpx.BasicAuth("", API_KEY)):
        assert (await http.get("/", auth=auth)).status_code == 200
    assert (await http.get("/v1/lag", auth=httpx.BasicAuth("x", OPERATOR_KEY))).status_code == 401


async def test_the_dashboard_shows_a_caller_its_own_batches(http: httpx.AsyncClient, board: Board) -> None:
    board.apply(
        [
            facts.message(facts.created("batch_mine", organization=ORGANIZATION)),
            facts.message(facts.created("batch_<script>alert(1)</script>", organization="org_other")),
        ]
    )
    everybody = await http.get("/", headers=_bearer(OPERATOR_KEY))
    assert everybody.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in everybody.headers["content-security-policy"]
    assert "batch_mine" in everybody.text
    assert "batch_&lt;script&gt;" in everybody.text
    assert "<script" not in everybody.text
    own = await http.get("/", headers=_bearer(API_KEY))
    assert "batch_mine" in own.text
    assert "alert(1)" not in own.text


async def test_a_warehouse_that_is_down_is_503(
    settings: Settings, http: httpx.AsyncClient, warehouse: EmbeddedWarehouse
) -> None:
    warehouse.kill()
    try:
        answer = await http.get("/v1/usage", headers=_bearer(API_KEY))
        assert answer.status_code == 503
        assert 0 < int(answer.headers["retry-after"]) <= 60
        assert (await http.get("/health")).status_code == 200
    finally:
        warehouse.start()
