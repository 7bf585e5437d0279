"""`body.openrelay` at create, and what the dispatcher reads out of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.records import Rejected
from schemas.settings import Egress, Limits
from streams.core.toolconfig import ToolConfig, UrlPolicy, WorkflowConfig, decode_openrelay
from streams.core.validate import Validator

CHAT = "/v1/chat/completions"
URL = "https://tools.example.com/run"


def judge(
    openrelay: Any, *, endpoint: str = CHAT, workflows: bool = True, egress: Egress | None = None
) -> tuple[str, str | None] | None:
    """Code and parameter of the rejection, None when the record is accepted."""
    record = {
        "custom_id": "a",
        "method": "POST",
        "url": endpoint,
        "body": {"model": "m", "openrelay": openrelay},
    }
    validator = Validator(
        endpoint=endpoint,
        models={"m"},
        workflows_enabled=workflows,
        egress=egress or Egress(),
        limits=Limits(),
    )
    (result,) = validator.feed(json.dumps(record).encode() + b"\n")
    return (result.code, result.param) if isinstance(result, Rejected) else None


def tool(**changes: Any) -> dict[str, Any]:
    return {"tool_config": {"url": URL} | changes}


def flow(**changes: Any) -> dict[str, Any]:
    return {"workflow": {"url": URL} | changes}


def test_fine() -> None:
    assert judge({}) is None
    assert judge(tool()) is None
    assert judge(tool(type="mcp", authorization="Bearer x", context={}, max_rounds=0, timeout_ms=0)) is None
    assert judge(flow(max_steps=1, max_requests=2, max_tokens=3, timeout_ms=4, context={"a": 1})) is None


@pytest.mark.parametrize("value", [None, [], "", 7, True])
def test_openrelay_must_be_an_object(value: Any) -> None:
    assert judge(value) == ("invalid_openrelay", "body.openrelay")


def test_unknown_keys_and_both() -> None:
    assert judge({"tool_rounds": 1}) == ("invalid_openrelay", "body.openrelay.tool_rounds")
    assert judge(tool() | {"x": 1}) == ("invalid_openrelay", "body.openrelay.x")
    assert judge(tool() | flow()) == ("invalid_openrelay", "body.openrelay")
    assert judge({"tool_config": 1, "workflow": 1}) == ("invalid_openrelay", "body.openrelay")


@pytest.mark.parametrize("value", [[], "", None, True, 7])
def test_configs_must_be_objects(value: Any) -> None:
    assert judge({"tool_config": value}) == ("invalid_tool_config", "body.openrelay.tool_config")
    assert judge({"workflow": value}) == ("invalid_workflow", "body.openrelay.workflow")


@pytest.mark.parametrize(
    "url",
    [
        None,
        7,
        "",
        "run",
        "/run",
        "//tools.example.com/run",
        "tools.example.com",
        "ftp://tools.example.com/",
        "file:///etc/passwd",
        "http://tools.example.com/",
        "https://",
        "https:///run",
        "https://user@tools.example.com/",
        "https://user:pass@tools.example.com/",
        "https://tools.example.com:0/",
        "https://tools.example.com:99999/",
        "https://tools.example.com:/",
        "https://tools.example.com:x/",
        "https://tools.example.com:-1/",
        "https://tools.example.com\\@evil/",
        "https://tools.example.com/a b",
        "https://tools.example.com/\n",
        "https://tools.example.com/\x00",
        " https://tools.example.com/",
        "https://tööls.example.com/",
        "https://①②⑦.0.0.1/",
        "https://127%2e0.0.1/",
        "https://tools.example.com/" + "x" * 2_048,
        "https://" + "x" * 300 + "/",
        "https://[::1",
        "https://[]/",
        "https://[fe80::1%25eth0]/",
        "https://1.2.3.4.5/",
        "https://256.1.1.1/",
        "https://0x/",
        "https://09.1.1.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7F.1/",
        "https://134744072/",
        "https://a..example/",
        "https://.example/",
        f"https://{'x' * 64}.example/",
    ],
)
def test_bad_urls(url: Any) -> None:
    anywhere = UrlPolicy(Egress(allow_cidrs=("0.0.0.0/0", "::/0")))
    assert anywhere.fault(url) is not None
    assert judge(tool(url=url)) == ("invalid_tool_config", "body.openrelay.tool_config.url")
    assert judge(flow(url=url)) == ("invalid_workflow", "body.openrelay.workflow.url")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "224.0.0.1",
        "255.255.255.255",
        "[::]",
        "[::1]",
        "[::127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[::ffff:8.8.8.8]",
        "[64:ff9b::a9fe:a9fe]",
        "[64:ff9b:1::1]",
        "[2002:a9fe:a9fe::]",
        "[2001::1]",
        "[fe80::1]",
        "[fec0::1]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[ff02::1]",
        "[2001:db8::1]",
    ],
)
def test_literals_that_are_not_public(host: str) -> None:
    assert judge(tool(url=f"https://{host}/")) == ("invalid_tool_config", "body.openrelay.tool_config.url")
    assert judge(flow(url=f"https://{host}:8443/x")) == ("invalid_workflow", "body.openrelay.workflow.url")


@pytest.mark.parametrize(
    "url",
    [
        "https://8.8.8.8/",
        "https://[2606:4700:4700::1111]:443/x?y#z",
        "HTTPS://Tools.Example.COM",
        "https://tools.example.com:65535?x=1",
        "https://localhost/",
        "https://a_b-c.example.",
        "https://1.example.com/",
        "https://x/" + "y" * 2_038,
    ],
)
def test_good_urls(url: str) -> None:
    assert judge(tool(url=url)) is None


def test_the_operator_may_open_ranges_and_http() -> None:
    egress = Egress(allow_cidrs=("127.0.0.0/8", "fd00::/8"), allow_http=True)
    for url in (
        "http://127.0.0.1:9/",
        "http://[fd00::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://x.example/",
    ):
        assert judge(tool(url=url), egress=egress) is None
    assert judge(tool(url="http://10.0.0.1/"), egress=egress) is not None
    assert judge(tool(url="http://127.0.0.1/"), egress=Egress(allow_cidrs=("127.0.0.0/8",))) is not None


@pytest.mark.parametrize("value", [-1, -(2**70), 1.5, 1.0, "8", True, None, [], {}])
@pytest.mark.parametrize("field", ["max_rounds", "timeout_ms"])
def test_bad_numbers(field: str, value: Any) -> None:
    assert judge(tool(**{field: value})) == ("invalid_tool_config", f"body.openrelay.tool_config.{field}")


@pytest.mark.parametrize("field", ["timeout_ms", "max_steps", "max_requests", "max_tokens"])
def test_bad_numbers_of_workflows(field: str) -> None:
    for value in (-1, 1.5, "8", True, None):
        assert judge(flow(**{field: value})) == ("invalid_workflow", f"body.openrelay.workflow.{field}")


@pytest.mark.parametrize("value", ["", " x", "x ", "a\nb", "a\x00", "é", "x" * 8_193, 7, None, []])
def test_bad_authorization(value: Any) -> None:
    expected = ("invalid_tool_config", "body.openrelay.tool_config.authorization")
    assert judge(tool(authorization=value)) == expected


def test_authorization_at_the_limit() -> None:
    assert judge(tool(authorization="x" * 8_192)) is None
    assert judge(tool(authorization="Bearer a b")) is None


@pytest.mark.parametrize("value", [None, [], "x", 1, True])
def test_bad_context(value: Any) -> None:
    assert judge(tool(context=value)) == ("invalid_tool_config", "body.openrelay.tool_config.context")


@pytest.mark.parametrize("value", ["ftp", "HTTP", "", None, 1])
def test_bad_type(value: Any) -> None:
    assert judge(tool(type=value)) == ("invalid_tool_config", "body.openrelay.tool_config.type")


def test_unknown_fields() -> None:
    assert judge(tool(max_round=1)) == ("invalid_tool_config", "body.openrelay.tool_config.max_round")
    assert judge(flow(max_rounds=1)) == ("invalid_workflow", "body.openrelay.workflow.max_rounds")


def test_where_they_are_allowed() -> None:
    assert judge(tool(), endpoint="/v1/completions") == ("invalid_tool_config", "body.openrelay.tool_config")
    assert judge(flow(), endpoint="/v1/completions") is None
    assert judge(flow(), workflows=False) == ("workflow_not_enabled", "body.openrelay.workflow")
    assert judge(flow(max_steps=-1), workflows=False) == (
        "invalid_workflow",
        "body.openrelay.workflow.max_steps",
    )


def test_decode_tool_config() -> None:
    data = (
        b'{"tool_config": {"url": "https://x.example", "authorization": "Bearer s3cret", '
        b'"context": {"n" : 1.10, "big": 123456789012345678901234567890}, "max_rounds": 99, '
        b'"timeout_ms": ' + b"9" * 5_000 + b"}}"
    )
    config = decode_openrelay(data)
    assert config == ToolConfig(
        type="http",
        url="https://x.example",
        authorization="Bearer s3cret",
        context=b'{"n" : 1.10, "big": 123456789012345678901234567890}',
        max_rounds=16,
        timeout_ms=300_000,
    )
    assert "s3cret" not in repr(config)
    assert "x.example" not in repr(config)


def test_decode_defaults() -> None:
    assert decode_openrelay(b"{}") is None
    assert decode_openrelay(b'{"tool_config":{"type":"mcp","url":"https://x","max_rounds":0}}') == ToolConfig(
        type="mcp", url="https://x", authorization=None, context=None, max_rounds=8, timeout_ms=30_000
    )
    assert decode_openrelay(b'{"workflow":{"url":"https://x"}}') == WorkflowConfig(
        url="https://x",
        authorization=None,
        context=None,
        timeout_ms=30_000,
        max_steps=16,
        max_requests=64,
        max_tokens=1_000_000,
    )
    clamped = decode_openrelay(
        b'{"workflow":{"url":"https://x","max_steps":65,"max_requests":1025,"max_tokens":1%s}}' % (b"0" * 30)
    )
    assert isinstance(clamped, WorkflowConfig)
    assert (clamped.max_steps, clamped.max_requests, clamped.max_tokens) == (64, 1_024, 2**53)


def test_numbers_clamp() -> None:
    for value in (2**70, 10**5, 17):
        assert judge(tool(max_rounds=value, timeout_ms=value)) is None


def test_repr_of_a_policy_shows_nothing_secret() -> None:
    assert UrlPolicy(Egress()).fault("https://u:p@x/") == "must not contain a user name or password"
