"""Settings from files and variables: strict, and every fault at once."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.settings import Limits, Settings
from services.settings import (
    SettingsError,
    checked,
    is_key,
    is_setting,
    load,
    read_tree,
    validate,
    write,
)
from tests.support.settings import SECRET, settings_for


@pytest.fixture
def good(tmp_path: Path) -> Settings:
    return settings_for(tmp_path, bootstrap="127.0.0.1:9092")


def _tree(settings: Settings) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(msgspec.json.encode(settings))
    return tree


def _faults(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        checked(tree)
    return refused.value.faults


def test_written_settings_are_read_back(good: Settings, tmp_path: Path) -> None:
    file = tmp_path / "run" / "settings.json"
    write(good, file)
    assert load(file, {}) == good
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    write(good, file)
    assert [each.name for each in file.parent.iterdir()] == ["settings.json"]


def test_toml_with_variables(tmp_path: Path) -> None:
    file = tmp_path / "openrelay.toml"
    file.write_text(
        f'''
        data_dir = "/srv/openrelay"
        [kafka]
        bootstrap = "a:1"
        [clickhouse]
        url = "http://c:8123"
        [storage]
        url = "s3://bucket/prefix"
        [secrets]
        keys = ["{SECRET}"]
        [limits]
        max_attempts = 4
        '''
    )
    variables = {
        "OPENRELAY_KAFKA__BOOTSTRAP": "b1:9092,b2:9092",
        "OPENRELAY_LIMITS__MAX_ATTEMPTS": "3",
        "OPENRELAY_LIMITS__RETRY_BACKOFF_S": "0.5",
        "OPENRELAY_EGRESS__ALLOW_CIDRS": '["10.0.0.0/8"]',
        "OPENRELAY_HTTP__PUBLIC_URL": "https://inference.example.com",
        "OPENRELAY_STORAGE__PRESIGNED_PUTS": "bucket",
        "OPENRELAY_ORGANIZATIONS": '[{"id": "org_a", "api_keys": ["or_0123456789abcdef"]}]',
        "OPENRELAY_MODELS": '{"a/b": {"input_nano_usd_per_mtok": 1, "output_nano_usd_per_mtok": 2, '
        '"pools": [{"base_url": "http://gpu:8000/v1"}]}}',
        "OPENRELAY_API_KEY": "or_not_a_setting_at_all",
        "OPENRELAY_BASE_URL": "http://nor.this/v1",
        "HOME": "/root",
    }
    settings = load(file, variables)
    assert settings.kafka.bootstrap == "b1:9092,b2:9092"
    assert settings.limits == Limits(max_attempts=3, retry_backoff_s=0.5)
    assert settings.egress.allow_cidrs == ("10.0.0.0/8",)
    assert settings.http.public_url == "https://inference.example.com"
    assert settings.storage.presigned_puts == "bucket"
    assert settings.organizations[0].api_keys == ("or_0123456789abcdef",)
    assert settings.models["a/b"].pools[0].base_url == "http://gpu:8000/v1"
    assert settings.data_dir == "/srv/openrelay"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OPENRELAY_LIMITS__MAX_ATTEMPT", "3", "there is no setting limits.max_attempt"),
        ("OPENRELAY_LIMIT__MAX_ATTEMPTS", "3", "there is no setting limit.max_attempts"),
        ("OPENRELAY_LIMITS__MAX_ATTEMPTS", "three", "limits.max_attempts must be an integer, not 'three'"),
        ("OPENRELAY_LIMITS__DRAIN_S", "soon", "limits.drain_s must be a number, not 'soon'"),
        ("OPENRELAY_EGRESS__ALLOW_HTTP", "yes", "egress.allow_http must be true or false, not 'yes'"),
        ("OPENRELAY_SECRETS__KEYS", "c2VjcmV0", "secrets.keys must be a list, written as JSON"),
        ("OPENRELAY_ORGANIZATIONS", "a", "organizations must be a list, written as JSON"),
        ("OPENRELAY_MODELS", "a", "models must be a table, written as JSON"),
        ("OPENRELAY_MODELS__A", "{}", "there is no setting models.a"),
    ],
)
def test_a_variable_that_sets_nothing_is_a_fault(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_tree(None, {name: value})
    assert len(refused.value.faults) == 1
    assert name in refused.value.faults[0]
    assert says in refused.value.faults[0]
    assert "c2VjcmV0" not in refused.value.faults[0]


def test_which_variables_are_settings() -> None:
    assert is_setting("OPENRELAY_LIMITS__DRAIN_S")
    assert is_setting("OPENRELAY_MODELS")
    assert is_setting("OPENRELAY_DATA_DIR")
    assert not is_setting("OPENRELAY_API_KEY")
    assert not is_setting("OPENRELAY_BASE_URL")
    assert not is_setting("OPENRELAY_READY_FD")
    assert not is_setting("OTHER_LIMITS__DRAIN_S")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", "x = "), ("a.json", "{"), ("a.json", "[]"), ("a.toml", None), ("a.toml", b"\xff")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | bytes | None) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=name):
        load(file, {})


def test_faults_of_form_are_found_together(good: Settings) -> None:
    tree = _tree(good)
    del tree["clickhouse"]
    tree["kafka"]["bootstrap"] = 7
    tree["limits"]["max_atempts"] = 3
    tree["limits"]["drain_s"] = "20"
    tree["limits"]["max_records"] = True
    tree["organizations"].append({"features": "batch"})
    tree["models"]["openrelay/test"]["pools"][0]["max_concurrency"] = 1.5
    tree["extra"] = 1
    assert _faults(tree) == [
        "extra: unknown key",
        "kafka.bootstrap: Expected `str`, got `int`",
        "clickhouse: missing",
        "limits.max_atempts: unknown key",
        "limits.drain_s: Expected `float`, got `str`",
        "limits.max_records: Expected `int`, got `bool`",
        "organizations[1].id: missing",
        "organizations[1].features: Expected `array`, got `str`",
        'models."openrelay/test".pools[0].max_concurrency: Expected `int`, got `float`',
    ]


def test_a_faultless_tree_is_good(good: Settings) -> None:
    assert checked(_tree(good)) == good
    assert validate(good) == []


def test_faults_of_form_hide_no_other_and_count_once(good: Settings) -> None:
    tree = _tree(good)
    del tree["clickhouse"], tree["models"]["openrelay/test"]["output_nano_usd_per_mtok"]
    tree["secrets"]["keys"] = "key"
    tree["storage"]["url"] = "ftp://x"
    tree["limits"] |= {"max_atempts": 3, "drain_s": "20", "max_attempts": 0}
    tree["organizations"] += [{"features": ["magic"]}, 7, {"id": good.organizations[0].id}]
    tree["models"]["openrelay/test"]["pools"] += [{"max_concurrency": 0}, {"base_url": "gpu", "api_key": 1}]
    tree["models"]["plain"] = []
    assert _faults(tree) == [
        "clickhouse: missing",
        "secrets.keys: Expected `array`, got `str`",
        "limits.max_atempts: unknown key",
        "limits.drain_s: Expected `float`, got `str`",
        "organizations[1].id: missing",
        "organizations[2]: Expected `object`, got `int`",
        'models."openrelay/test".output_nano_usd_per_mtok: missing',
        'models."openrelay/test".pools[1].base_url: missing',
        'models."openrelay/test".pools[2].api_key: Expected `str | null`, got `int`',
        "models.plain: Expected `object`, got `array`",
        "storage.url: must start with one of file://, s3://, gs://, az://",
        "limits.max_attempts: must be more than zero",
        "organizations[1].features: unknown feature 'magic'; there are batch, workflows",
        f"organizations[3].id: {good.organizations[0].id!r} is used twice",
        'models."openrelay/test".pools[1].max_concurrency: must be at least 1',
        'models."openrelay/test".pools[2].base_url: must be an http or https URL',
    ]


def test_urls_of_a_bucket_hold_no_longer_than_its_signatures(good: Settings) -> None:
    tree = _tree(good)
    tree["storage"] = {"url": "s3://bucket", "presigned_puts": "bucket"}
    tree["limits"]["presign_ttl_s"] = 604_800
    assert checked(tree).storage.presigned_puts == "bucket"
    tree["limits"]["presign_ttl_s"] = 604_801
    assert _faults(tree) == ["limits.presign_ttl_s: at most 604800 where URLs are the bucket's"]
    del tree["storage"]["presigned_puts"]
    assert checked(tree).storage.presigned_puts == "api"


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("kafka.bootstrap", "kafka", "kafka.bootstrap"),
        ("kafka.bootstrap", "a:1,b:99999", "kafka.bootstrap"),
        ("kafka.partitions", 0, "kafka.partitions"),
        ("clickhouse.url", "tcp://c:9000", "clickhouse.url"),
        ("clickhouse.url", "http://", "clickhouse.url"),
        ("storage.url", "ftp://x", "storage.url"),
        ("storage.url", "file://relative", "storage.url"),
        ("storage.presigned_puts", "bucket", "storage.presigned_puts"),
        ("storage.presigned_puts", "elsewhere", "storage.presigned_puts"),
        ("secrets.keys", [], "secrets.keys"),
        ("secrets.keys", [SECRET, "c2hvcnQ="], "secrets.keys[1]"),
        ("secrets.keys", ["not base64 at all"], "secrets.keys[0]"),
        ("http.public_url", "inference.example.com", "http.public_url"),
        ("http.header_timeout_s", 0, "http.header_timeout_s"),
        ("egress.allow_cidrs", ["10.0.0.1/8"], "egress.allow_cidrs[0]"),
        ("limits.max_attempts", 0, "limits.max_attempts"),
        ("limits.completion_window_s", -1, "limits.completion_window_s"),
        ("limits.drain_s", -1, "limits.drain_s"),
        ("limits.request_time_limit_s", 0, "limits.request_time_limit_s"),
        ("organizations.0.id", "", "organizations[0].id"),
        ("organizations.0.id", "org\u0000", "organizations[0].id"),
        ("organizations.0.features", ["batch", "magic"], "organizations[0].features"),
        ("organizations.0.weight", 0, "organizations[0].weight"),
        ("organizations.0.api_keys", ["sk_0123456789abcdef"], "organizations[0].api_keys[0]"),
        ("organizations.0.api_keys", ["or_short"], "organizations[0].api_keys[0]"),
        ("models.openrelay/test.pools", [], 'models."openrelay/test".pools'),
        ("models.openrelay/test.pools.0.base_url", "gpu:8000", 'models."openrelay/test".pools[0].base_url'),
        *(
            ("models.openrelay/test.pools.0.base_url", url, 'models."openrelay/test".pools[0].base_url')
            for url in (
                "http://a..b/v1",
                "http://.a/v1",
                "http://" + "a" * 64 + ".example/v1",
                "http://" + "a." * 130 + "example/v1",
                "http://xn--\u2100/v1",
                "http://-/v1",
                "http://*/v1",
                "http://a%2eb/v1",
                "http://1.2.3/v1",
                "http://256.1.1.1/v1",
                "http://[::g]/v1",
                "http://gpu:0/v1",
                "http://gpu:99999/v1",
                "http://gpu:port/v1",
                "http://g pu/v1",
                "http://gpu /v1",
                "http://gpu/v1\n",
                "http://ho\u200bst/v1",
                "http://gpu/v1?x=y",
                "http://gpu/v1#x",
                "http://a%3Ab:c@gpu/v1",
                "ftp://gpu/v1",
                "http://",
            )
        ),
        *(
            ("models.openrelay/test.pools.0.api_key", key, 'models."openrelay/test".pools[0].api_key')
            for key in ("sk-1\n", "sk-1\r\nX: y", " sk-1", "sk-\u0000", "sk-\u00e9", "sk-\u20ac")
        ),
        (
            "models.openrelay/test.pools.0.max_concurrency",
            0,
            'models."openrelay/test".pools[0].max_concurrency',
        ),
        (
            "models.openrelay/test.input_nano_usd_per_mtok",
            -1,
            'models."openrelay/test".input_nano_usd_per_mtok',
        ),
    ],
)
def test_faults_of_meaning_name_their_key(good: Settings, path: str, value: object, fault: str) -> None:
    tree = _tree(good)
    *keys, last = path.split(".")
    at: Any = tree
    for key in keys:
        at = at[int(key) if isinstance(at, list) else key]
    at[last] = value
    [said] = _faults(tree)
    assert said.startswith(f"{fault}: ")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu:8000/v1", "gpu:8000"),
        ("https://GPU_1.internal./v1/", "gpu_1.internal."),
        ("http://m\u00fcnchen.example/v1", "m\u00fcnchen.example"),
        ("http://10.0.0.1/v1", "10.0.0.1"),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8000"),
        ("http://user:p%40ss@gpu:8000/v1", "gpu:8000"),
    ],
)
def test_where_a_pool_may_be_and_what_is_shown_of_it(good: Settings, url: str, address: str) -> None:
    tree = _tree(good)
    tree["models"]["openrelay/test"]["pools"][0]["base_url"] = url
    [pool] = checked(tree).models["openrelay/test"].pools
    assert pool.address == address
    assert "p%40ss" not in repr(pool)


def test_one_of_a_password_and_a_key_and_neither_is_repeated(good: Settings) -> None:
    tree = _tree(good)
    tree["models"]["openrelay/test"]["pools"] = [
        {"base_url": "http://user:hunter2@gpu/v1", "api_key": "sk-1"},
        {"base_url": "http://user:hunter2@gpu..x/v1"},
        {"base_url": "http://gpu/v1", "api_key": "sk-hunter2\n"},
    ]
    faults = _faults(tree)
    assert [fault.partition(": ")[0].rpartition(".pools")[2] for fault in faults] == [
        "[0].base_url",
        "[1].base_url",
        "[2].api_key",
    ]
    assert "hunter2" not in str(faults)


def test_the_same_key_and_the_same_organization_twice(good: Settings) -> None:
    tree = _tree(good)
    tree["organizations"].append(tree["organizations"][0])
    faults = _faults(tree)
    assert [fault.split(":")[0] for fault in faults] == [
        "organizations[1].id",
        "organizations[1].api_keys[0]",
    ]


def test_zero_is_allowed_where_it_means_something(good: Settings) -> None:
    limits = Limits(retry_backoff_s=0, expiry_grace_s=0, drain_s=0)
    assert validate(msgspec.structs.replace(good, limits=limits)) == []


@pytest.mark.parametrize("key", ["or_0123456789abc", "vl_!#$%&'()*+,-./~", "or_" + "x" * 500])
def test_keys_are_taken_as_written(key: str) -> None:
    assert is_key(key)


@pytest.mark.parametrize(
    "key",
    ["or_0123456789ab", "or_0123456789 abc", "or_0123456789ab\n", "xx_0123456789abc", "or_é123456789abc"],
)
def test_keys_that_are_none(key: str) -> None:
    assert not is_key(key)


def test_secrets_hide_in_repr(good: Settings) -> None:
    shown = repr(good)
    assert SECRET not in shown
    assert good.organizations[0].api_keys[0] not in shown
    assert base64.b64decode(SECRET).hex() not in shown
