"""What an embedded stack fills in, and what it keeps."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from services.embedded.ports import free_port, is_free
from services.embedded.resolve import PLACEHOLDERS, Ports, choose_ports, made, resolve
from services.settings import SettingsError
from tests.support.settings import SECRET

PORTS = Ports(api=8000, control=8001, kafka=1, kafka_controller=2, warehouse=3, simulator=4)
SIMULATOR = "http://127.0.0.1:4/v1"
PRICES = {"input_nano_usd_per_mtok": 1, "output_nano_usd_per_mtok": 2}


def test_nothing_given(tmp_path: Path) -> None:
    resolved = resolve({}, tmp_path, PORTS, PLACEHOLDERS)
    settings = resolved.settings
    assert (resolved.kafka, resolved.warehouse) == (True, True)
    assert resolved.simulated == ("openrelay/gpt-oss-120b", "openrelay/gemma-4-31b")
    assert settings.kafka.bootstrap == "127.0.0.1:1"
    assert settings.clickhouse.url == "http://127.0.0.1:3"
    assert settings.storage.url == (tmp_path / "blobs").as_uri()
    assert settings.secrets.keys == (PLACEHOLDERS.seal_key,)
    [organization] = settings.organizations
    assert organization.id == "org_default"
    assert organization.features == ("batch", "workflows")
    assert organization.api_keys == (PLACEHOLDERS.api_key,)
    assert {pool.base_url for model in settings.models.values() for pool in model.pools} == {SIMULATOR}


def test_everything_given(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "kafka": {"bootstrap": "k:9092", "replication_factor": 3},
        "clickhouse": {"url": "http://c:8123"},
        "storage": {"url": "s3://b/p"},
        "secrets": {"keys": [SECRET]},
        "organizations": [{"id": "org_a"}],
        "models": {"m": PRICES | {"pools": [{"base_url": "http://gpu/v1"}]}},
    }
    before = json.dumps(tree)
    resolved = resolve(tree, tmp_path, PORTS, PLACEHOLDERS)
    assert resolved[1:] == (False, False, ())
    assert resolved.settings.kafka.bootstrap == "k:9092"
    assert resolved.settings.organizations[0].api_keys == ()
    assert json.dumps(tree) == before


def test_tables_without_their_deciding_key_stay_embedded(tmp_path: Path) -> None:
    resolved = resolve({"kafka": {"partitions": 2}}, tmp_path, PORTS, PLACEHOLDERS)
    assert resolved.kafka
    assert resolved.settings.kafka.partitions == 2


def test_a_model_without_pools_is_simulated(tmp_path: Path) -> None:
    models = {"a": PRICES, "b": PRICES | {"pools": [{"base_url": "http://gpu/v1"}]}}
    resolved = resolve({"models": models}, tmp_path, PORTS, PLACEHOLDERS)
    assert resolved.simulated == ("a",)
    assert resolved.settings.models["a"].pools[0].base_url == SIMULATOR
    assert resolved.settings.models["b"].pools[0].base_url == "http://gpu/v1"


@pytest.mark.parametrize("tree", [{"kafka": "k:9092"}, {"models": []}, {"models": {"m": 1}}, {"storage": 1}])
def test_tables_of_another_type_are_faults(tmp_path: Path, tree: dict[str, Any]) -> None:
    if tree == {"models": []}:  # empty is absent
        assert resolve(tree, tmp_path, PORTS, PLACEHOLDERS).simulated
        return
    with pytest.raises(SettingsError) as refused:
        resolve(tree, tmp_path, PORTS, PLACEHOLDERS)
    assert refused.value.faults


def test_what_is_made_is_kept_for_its_owner(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert made(tmp_path) == first
    assert first.api_key.startswith("or_")
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600
    assert made(tmp_path / "other") != first


def test_damaged_secrets_are_not_made_anew(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(SettingsError, match=r"secrets\.json"):
        made(tmp_path)


def test_ports_are_the_last_ones_where_they_are_free(tmp_path: Path) -> None:
    first = choose_ports(tmp_path, 0, 0)
    assert choose_ports(tmp_path, 0, 0) == first
    assert len(set(first)) == len(first)
    assert choose_ports(tmp_path, 8000, 8001)[2:] == first[2:]


def test_a_free_port_is_free_and_none_of_an_outgoing_connection() -> None:
    port = free_port()
    assert is_free(port)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as out,
    ):
        assert port < min(server.getsockname()[1], out.getsockname()[1])
