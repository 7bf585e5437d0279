"""Keys as operators hold them: issued once, seen never again, revoked at once on every host."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from schemas import topics
from schemas.facts import KeyIssued, KeyRevoked, KeyUsed
from schemas.ids import OrganizationId
from schemas.settings import Organization
from services.api import keys as form
from services.api.key_use import KeyUse
from services.operator import keys
from services.operator.log import Log
from streams.kafka.messages import Message
from tests.api.conftest import api_settings
from tests.api.host import Host
from tests.support.broker import EmbeddedBroker
from tests.support.command import environment, openrelay
from tests.support.control import ControlHost
from tests.support.until import until

REVOKED_WITHIN_S = 60


def run(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*openrelay(), "keys", *arguments, "--config", str(host.directory / "settings.json")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def create(host: Host, *more: str) -> dict[str, Any]:
    done = run(host, "create", "--organization", "acme", "--json", *more)
    assert done.returncode == 0, done.stderr
    issued: dict[str, Any] = json.loads(done.stdout)
    return issued


def row(host: Host, key_id: str) -> dict[str, Any]:
    done = run(host, "list", "--json")
    assert done.returncode == 0, done.stderr
    [found] = [each for each in json.loads(done.stdout) if each["id"] == key_id]
    return dict(found)


def status(url: str, key: str) -> int:
    return httpx.get(url, headers={"authorization": f"Bearer {key}"}, trust_env=False).status_code


def test_a_key_works_everywhere_until_it_is_revoked(
    host: Host, api_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    other = Host(tmp_path / "other", api_settings(api_broker, tmp_path / "other"))
    other.start()
    control = ControlHost(tmp_path, host.settings)
    control.start()
    try:
        urls = [f"{host.url}/v1/files", f"{other.url}/v1/files", f"{control.url}/v1/lag"]
        issued = create(host, "--name", "nightly")
        for url in urls:
            until(lambda url=url: status(url, issued["key"]) == 200, 60, f"{url} does not take the key")
        assert row(host, issued["id"])["revoked_at_ms"] is None
        assert run(host, "revoke", issued["id"]).returncode == 0
        for url in urls:
            until(
                lambda url=url: status(url, issued["key"]) == 401, REVOKED_WITHIN_S, f"{url} still takes it"
            )
        found = row(host, issued["id"])
        assert (found["name"], found["organization"], found["role"]) == ("nightly", "acme", "organization")
        assert found["created_at_ms"] <= found["revoked_at_ms"]
        again = run(host, "revoke", issued["id"])
        assert (again.returncode, "already" in again.stderr) == (0, True)
    finally:
        control.stop()
        assert other.stop() == 0
        other.kill()


def test_only_a_fingerprint_is_kept(host: Host) -> None:
    done = run(host, "create", "--organization", "acme", "--role", "finance")
    key = done.stdout.strip()
    assert form.well_formed(key)
    assert form.key_id(key) in done.stderr
    with Log(host.settings.kafka) as log:
        values = [message.value or b"" for message in log.partition(topics.KEYS, 0)]
    assert any(form.fingerprint(key).encode() in value for value in values)
    assert not any(key[form.HINT_LENGTH :].encode() in value for value in values)
    assert key not in run(host, "list").stdout


def test_the_list_says_when_a_key_was_used(host: Host) -> None:
    issued = create(host)
    assert row(host, issued["id"])["last_used_at_ms"] is None
    until(lambda: status(f"{host.url}/v1/files", issued["key"]) == 200, 60, "the key is not taken")
    until(lambda: row(host, issued["id"])["last_used_at_ms"], 30, "its use is not listed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "--organization", "nobody"], "no organization 'nobody' in the settings"),
        (["revoke", "key_0000000000000000"], "no key key_0000000000000000"),
        (["revoke", form.key_id("or_test_acme_00000000")], "take it out there"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(host: Host, arguments: list[str], said: str) -> None:
    done = run(host, *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_settings_or_a_stack_the_command_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [*openrelay(), "keys", "list"],
        env=environment(XDG_DATA_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "--config" in done.stderr) == (1, True)


def test_the_first_issue_and_any_revocation_hold_in_any_order() -> None:
    first = KeyIssued(
        key_id="key_1", sha256="a", organization=OrganizationId("x"), role=keys.KeyRole.FINANCE, name="first"
    )
    facts = [
        KeyUsed(key_id="key_1"),
        KeyRevoked(key_id="key_1"),
        first,
        msgspec.structs.replace(first, name="second"),
        KeyRevoked(key_id="key_1"),
        KeyUsed(key_id="key_1"),
    ]
    messages = [
        Message(topics.KEYS, 0, n, 1000 + n, None, msgspec.json.encode(fact)) for n, fact in enumerate(facts)
    ]
    configured = Organization(id="x", api_keys=("or_configured_key_0001",))
    listed, issued = keys.fold([configured], messages)
    assert (listed.source, listed.id) == ("settings", form.key_id("or_configured_key_0001"))
    assert (issued.name, issued.created_at_ms, issued.revoked_at_ms, issued.last_used_at_ms) == (
        "first",
        1002,
        1001,
        1005,
    )


def test_the_use_of_a_key_is_said_once_a_minute() -> None:
    said: list[str] = []

    class Facts:
        def mention(self, topic: str, key: str, value: bytes, partition: int) -> None:
            said.append(key)

    now = 0.0
    use = KeyUse(Facts(), lambda: now)  # type: ignore[arg-type]
    use.note("a")
    use.note("a")
    use.note("b")
    now = 59.9
    use.note("a")
    now = 60.0
    use.note("a")
    assert said == ["a:used", "b:used", "a:used"]
