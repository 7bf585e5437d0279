"""Who may see what: keys, roles, features, and other organizations' ids."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from schemas.facts import KeyIssued, KeyRevoked, KeyRole
from schemas.ids import OrganizationId
from services.api import keys
from tests.api.host import ACME, CHAT, IDLE, Facts, Host, create, error, order, record, stored

ROUTES = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files/presign"),
    ("GET", "/v1/files/{file}"),
    ("DELETE", "/v1/files/{file}"),
    ("GET", "/v1/files/{file}/content"),
    ("POST", "/v1/files/{file}/complete"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch}"),
    ("POST", "/v1/batches/{batch}/cancel"),
]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {ACME}"},
        {"authorization": ACME},
        {"authorization": f"Bearer {ACME}x"},
        {"authorization": f"Bearer {ACME[:-1]}"},
        {"authorization": "Bearer " + "x" * 5_000},
        {"authorization": "Bearer \xff"},
        {"authorization": "Bearer wrong", "x-api-key": ACME},
        {"x-api-key": "or_nobody_knows_this_one"},
        {"authorization": f"Bearer {keys.make(bytes(24))}"},
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/batches/x", "/v1/models", "/nowhere", "/v1/chat/completions"]
)
def test_bad_keys_get_one_answer(host: Host, headers: dict[str, str], path: str) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.get(host.url + path, headers=raw, trust_env=False)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert error(answer) == {
        "message": "The API key is missing or not valid.",
        "type": "invalid_request_error",
        "code": "invalid_api_key",
        "param": None,
    }


def test_x_api_key(host: Host) -> None:
    with host.client(None, **{"x-api-key": ACME}) as client:
        assert client.get("/v1/files").status_code == 200
    with host.client(None, authorization=f"bearer {ACME}") as client:
        assert client.get("/v1/files").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", CHAT, "/v1/completions", "/v1/usage", "/v1/files/", "/v2/files"],
)
def test_unknown_paths(client: httpx.Client, path: str) -> None:
    for answer in (client.get(path), client.post(path, json={})):
        assert answer.status_code == 404
        assert error(answer)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/batches", {"GET", "HEAD", "POST"}),
        ("PUT", "/v1/files", {"GET", "HEAD", "POST"}),
        ("PATCH", "/v1/files/x", {"GET", "HEAD", "DELETE"}),
        ("GET", "/v1/batches/x/cancel", {"POST"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
    ],
)
def test_other_methods(client: httpx.Client, method: str, path: str, allowed: set[str]) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("accept", ["text/html", "application/xml", "*/*", "nonsense"])
def test_accept_is_no_reason_to_refuse(client: httpx.Client, accept: str) -> None:
    answer = client.get("/v1/models", headers={"accept": accept})
    assert answer.status_code == 200
    assert [model["id"] for model in answer.json()["data"]] == ["m", "n"]


def test_models(client: httpx.Client) -> None:
    assert client.get("/v1/models/m").json()["object"] == "model"
    assert client.get("/v1/models/openrelay/none").status_code == 404


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_feature_nothing_is_there(host: Host, method: str, path: str) -> None:
    with host.client(IDLE) as idle:
        answer = idle.request(method, path.format(file="file-x", batch="batch_x"))
        assert answer.status_code == 404
        assert error(answer)["code"] == "not_found"
        assert idle.get("/v1/models").status_code == 200


@pytest.fixture(scope="module")
def property_of_acme(host: Host) -> dict[str, str]:
    """Ids of an uploaded file, a result file, an open batch and one that ended."""
    facts = Facts(host.settings)
    with host.client() as client:
        ended = create(client)
        facts.finish(ended["id"])
        found = {
            "file": stored(client),
            "result": f"file-{ended['id']}-output",
            "open": create(client)["id"],
            "ended": ended["id"],
            "input": ended["input_file_id"],
        }
        assert client.get(f"/v1/files/{found['result']}/content").status_code == 200
    facts.close()
    return found


def test_another_organizations_ids_look_unknown(
    client: httpx.Client, rival: httpx.Client, property_of_acme: dict[str, str]
) -> None:
    def answers(caller: httpx.Client, method: str, path: str, **more: Any) -> tuple[int, bytes]:
        answer = caller.request(method, path, **more)
        return answer.status_code, answer.content

    unknown_file = "file-" + secrets.token_hex(16)
    unknown_batch = "batch_" + secrets.token_hex(16)
    for name in ("file", "result", "input"):
        file = property_of_acme[name]
        for method, path in (
            ("GET", "/v1/files/{}"),
            ("DELETE", "/v1/files/{}"),
            ("GET", "/v1/files/{}/content"),
            ("GET", "/v1/files?after={}"),
        ):
            theirs = answers(rival, method, path.format(file))
            assert theirs[0] == 404, (method, path, name)
            assert theirs == answers(rival, method, path.format(unknown_file))
        theirs = answers(rival, "POST", "/v1/batches", json=order(input_file_id=file))
        assert theirs == answers(rival, "POST", "/v1/batches", json=order(input_file_id=unknown_file))
        assert theirs[0] == 404
        assert client.get(f"/v1/files/{file}").status_code == 200
    for name in ("open", "ended"):
        batch = property_of_acme[name]
        for method, path in (
            ("GET", "/v1/batches/{}"),
            ("POST", "/v1/batches/{}/cancel"),
            ("GET", "/v1/batches?after={}"),
        ):
            theirs = answers(rival, method, path.format(batch))
            assert theirs[0] == 404, (method, path, name)
            assert theirs == answers(rival, method, path.format(unknown_batch))
    assert client.get(f"/v1/batches/{property_of_acme['open']}").json()["cancelling_at"] is None


def test_lists_show_only_ones_own(rival: httpx.Client, property_of_acme: dict[str, str]) -> None:
    mine = stored(rival)
    shown = {each["id"] for each in rival.get("/v1/files").json()["data"]}
    assert mine in shown
    assert not shown & set(property_of_acme.values())
    batches = {each["id"] for each in rival.get("/v1/batches?limit=100").json()["data"]}
    assert not batches & set(property_of_acme.values())


def test_presigned_upload_of_another_organization(client: httpx.Client, rival: httpx.Client) -> None:
    content = b'{"a":1}\n'
    ticket = client.post("/v1/files/presign", json={"bytes": len(content)}).json()
    path = f"/v1/files/{ticket['file_id']}/complete"
    unknown = rival.post(f"/v1/files/file-{'0' * 32}/complete")
    assert unknown.status_code == 404
    assert client.post(path).status_code == 400
    assert rival.post(path).content == unknown.content
    assert httpx.put(ticket["put_url"], content=content, trust_env=False).status_code == 200
    assert rival.post(path).content == unknown.content
    assert client.post(path).status_code == 200
    assert rival.post(path).content == unknown.content


def test_issued_keys_work_until_revoked(host: Host, facts: Facts) -> None:
    key = facts.issue("acme")
    key_id = keys.key_id(key)
    with host.client() as client:
        client.get("/v1/files").raise_for_status()
    with host.client(key) as issued:
        assert issued.get("/v1/files").status_code == 200
        facts.key(KeyRevoked(key_id=key_id))
        with host.client() as client:
            client.get("/v1/files").raise_for_status()
        assert issued.get("/v1/files").status_code == 401
        # A second `issued` fact does not bring it back.
        facts.key(
            KeyIssued(
                key_id=key_id,
                sha256=keys.fingerprint(key),
                organization=OrganizationId("acme"),
                role=KeyRole.ORGANIZATION,
            )
        )
        with host.client() as client:
            client.get("/v1/files").raise_for_status()
        assert issued.get("/v1/files").status_code == 401


def test_roles(host: Host, facts: Facts) -> None:
    finance = facts.issue("acme", KeyRole.FINANCE)
    operator = facts.issue("acme", KeyRole.OPERATOR)
    with host.client() as client:
        client.get("/v1/files").raise_for_status()
    with host.client(finance) as caller:
        assert caller.get("/v1/batches").status_code == 404
        assert caller.get("/v1/models").status_code == 200
    with host.client(operator) as caller:
        assert caller.get("/v1/batches").status_code == 200


def test_an_organization_the_settings_do_not_name(host: Host, facts: Facts) -> None:
    key = facts.issue("org_new")
    with host.client() as client:
        client.get("/v1/files").raise_for_status()
    with host.client(key) as caller:
        batch = create(caller, requests=[record("a") | {"url": CHAT}])
        assert caller.get(f"/v1/batches/{batch['id']}").status_code == 200


def test_keys_are_told_from_mistakes() -> None:
    key = keys.make(bytes(range(24)))
    assert keys.well_formed(key)
    assert len(key) == 41
    for place in range(len(key)):
        wrong = key[:place] + ("x" if key[place] != "x" else "y") + key[place + 1 :]
        assert not keys.well_formed(wrong)
    for wrong in (key[:-1], key + "0", key.lower(), "", "or_", key[3:], key + "\n"):
        assert not keys.well_formed(wrong)
    assert keys.make(b"\xff" * 24) != keys.make(b"\xfe" * 24)
    with pytest.raises(ValueError, match="24 random bytes"):
        keys.make(b"short")
