"""Where key and base URL come from."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from services.cli import credentials
from services.cli.credentials import (
    DEFAULT_BASE_URL,
    BadUrl,
    NoCredentials,
    Places,
    Target,
    forget,
    normal_base_url,
    resolve,
    store,
)

URL = "http://127.0.0.1:8000/v1"


def places(tmp_path: Path, **environ: str) -> Places:
    return Places(environ, tmp_path / "config", tmp_path / "data")


def run_stack(tmp_path: Path, pid: int, **fields: Any) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    connection = {
        "base_url": URL,
        "control_url": "http://127.0.0.1:9001",
        "api_key": "or_stack",
        "kafka_bootstrap": "127.0.0.1:1",
        "clickhouse_url": "http://127.0.0.1:2",
        "pids": {"api": pid},
    }
    (tmp_path / "data" / "connection.json").write_text(json.dumps(connection | fields))


def test_nothing_anywhere_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials) as missing:
        resolve(places(tmp_path))
    for help_ in ("orl auth login", "OPENRELAY_API_KEY", "openrelay up", DEFAULT_BASE_URL):
        assert help_ in str(missing.value)


def test_the_environment_comes_first(tmp_path: Path) -> None:
    run_stack(tmp_path, os.getpid())
    where = places(tmp_path, OPENRELAY_API_KEY="or_env", OPENRELAY_BASE_URL="https://example.com/v1/")
    store(where, URL, "or_stored", None)
    assert resolve(where) == Target("https://example.com/v1", "or_env", None)
    where.environ["OPENRELAY_CONTROL_URL"] = "https://control.example.com/"  # type: ignore[index]
    assert resolve(where).control_url == "https://control.example.com"


@pytest.mark.parametrize("key", ["or_\udcff\udcfe", "or_é", "or_a b", "or_a\nb", " "])
def test_what_no_header_can_carry_is_no_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(NoCredentials, match="OPENRELAY_API_KEY"):
        resolve(places(tmp_path, OPENRELAY_API_KEY=key))


def test_what_is_stored_comes_before_a_running_stack(tmp_path: Path) -> None:
    run_stack(tmp_path, os.getpid())
    where = places(tmp_path)
    assert resolve(where) == Target(URL, "or_stack", "http://127.0.0.1:9001")
    store(where, DEFAULT_BASE_URL, "or_stored", None)
    assert resolve(where) == Target(DEFAULT_BASE_URL, "or_stored", "https://api.openrelay.inc")


def test_a_key_goes_only_where_it_belongs(tmp_path: Path) -> None:
    run_stack(tmp_path, os.getpid())
    where = places(tmp_path, OPENRELAY_BASE_URL="https://elsewhere.example/v1")
    store(where, DEFAULT_BASE_URL, "or_stored", None)
    with pytest.raises(NoCredentials, match="elsewhere"):
        resolve(where)
    assert resolve(places(tmp_path, OPENRELAY_BASE_URL=URL)).api_key == "or_stack"
    assert resolve(places(tmp_path, OPENRELAY_BASE_URL=DEFAULT_BASE_URL)).api_key == "or_stored"


def test_a_stack_is_looked_for_where_it_was_told_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENRELAY_DATA_DIR", str(tmp_path / "data"))
    assert credentials.places().data_dir == tmp_path / "data"
    monkeypatch.delenv("OPENRELAY_DATA_DIR")
    assert credentials.places().data_dir == platformdirs.user_data_path("openrelay")


def test_the_file_of_a_dead_stack_counts_for_nothing(tmp_path: Path) -> None:
    run_stack(tmp_path, 2**22 + 1)
    with pytest.raises(NoCredentials):
        resolve(places(tmp_path))


def test_the_file_is_for_this_user_only_and_keeps_other_servers(tmp_path: Path) -> None:
    where = places(tmp_path)
    store(where, URL, "or_one", "http://control")
    store(where, DEFAULT_BASE_URL, "or_two", None)
    assert stat.S_IMODE(where.credentials.stat().st_mode) == 0o600
    assert stat.S_IMODE(where.config_dir.stat().st_mode) == 0o700
    assert os.listdir(where.config_dir) == ["credentials.json"]
    assert resolve(where).api_key == "or_two"
    assert forget(where, None) == DEFAULT_BASE_URL
    assert resolve(where) == Target(URL, "or_one", "http://control")
    assert forget(where, DEFAULT_BASE_URL) is None
    assert forget(where, URL) == URL
    with pytest.raises(NoCredentials):
        resolve(where)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    where = places(tmp_path)
    where.config_dir.mkdir()
    where.credentials.write_text("{")
    with pytest.raises(NoCredentials, match=r"credentials\.json"):
        resolve(where)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://a.example/v1/", "https://a.example/v1"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000/", "http://[::1]:8000/v1"),
        ("https://a.example/proxy/v1?x=1", "https://a.example/proxy/v1"),
    ],
)
def test_base_urls_are_written_one_way(text: str, url: str) -> None:
    assert normal_base_url(text) == url


@pytest.mark.parametrize("text", ["", "a.example/v1", "ftp://a.example", "http://"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(BadUrl):
        normal_base_url(text)


def test_the_control_host_of_a_local_server_is_the_next_port(tmp_path: Path) -> None:
    where = places(tmp_path, OPENRELAY_BASE_URL="http://[::1]:8100/v1", OPENRELAY_API_KEY="or_x")
    assert resolve(where).control_url == "http://[::1]:8101"
    assert resolve(where).control_guessed
    where.environ["OPENRELAY_CONTROL_URL"] = "http://[::1]:9"  # type: ignore[index]
    assert not resolve(where).control_guessed
