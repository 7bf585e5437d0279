"""`body.openrelay`: how a record's tools are run, or the workflow it is.

The same reading serves twice: at create, where a fault rejects the record, and in the dispatcher, which
opens the sealed bytes of a record that passed. Addresses are judged here only when the URL spells one out;
names are judged when they are connected to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from schemas.errors import RecordCode
from schemas.settings import Egress
from streams.core.addresses import AddressPolicy, host_literal
from streams.core.strictjson import parse

MAX_URL = 2_048
MAX_AUTHORIZATION = 8 * 1024
DEFAULT_ROUNDS, MAX_ROUNDS = 8, 16
DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS = 30_000, 300_000
DEFAULT_STEPS, MAX_STEPS = 16, 64
DEFAULT_REQUESTS, MAX_REQUESTS = 64, 1_024
DEFAULT_TOKENS = 1_000_000
MAX_TOKENS = 2**53
"""Keeps the sum of tokens exact for every reader; far beyond what a window can hold."""

_URL = re.compile(r"(https?)://([^/?#]*)([/?#].*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_VISIBLE = re.compile(r"[!-~]+")
_PRINTABLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An executor of tool calls. `context` is the JSON of an object, as written."""

    type: Literal["http", "mcp"]
    url: str
    authorization: str | None
    context: bytes | None
    max_rounds: int
    timeout_ms: int

    def __repr__(self) -> str:
        return f"ToolConfig(type={self.type!r}, max_rounds={self.max_rounds}, timeout_ms={self.timeout_ms})"


class WorkflowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A callback that says what to run next. `context` is the JSON of an object, as written."""

    url: str
    authorization: str | None
    context: bytes | None
    timeout_ms: int
    max_steps: int
    max_requests: int
    max_tokens: int

    def __repr__(self) -> str:
        return f"WorkflowConfig(max_steps={self.max_steps}, max_requests={self.max_requests})"


class ConfigFault(Exception):
    """`openrelay` cannot be used: a code of `RecordCode`, the path below `body`, and why."""

    def __init__(self, code: str, param: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.message = message


class UrlPolicy:
    """What a URL of a tool or callback may be, from the operator's settings."""

    def __init__(self, egress: Egress) -> None:
        self._addresses = AddressPolicy(egress.allow_cidrs)
        self._allow_http = egress.allow_http

    def fault(self, url: object) -> str | None:
        """Why the URL is refused, None when it is not."""
        if not isinstance(url, str) or not url:
            return "must be an absolute URL"
        if len(url) > MAX_URL:
            return f"is longer than {MAX_URL} characters"
        if _VISIBLE.fullmatch(url) is None or "\\" in url:
            return "must not contain spaces, control characters, backslashes or other than ASCII characters"
        match = _URL.fullmatch(url)
        if match is None:
            return "must be an absolute https URL"
        if match[1].lower() == "http" and not self._allow_http:
            return "must use https"
        if "@" in match[2]:
            return "must not contain a user name or password"
        authority = _AUTHORITY.fullmatch(match[2])
        if authority is None or len(authority[1]) > 253:
            return "has no usable host and port"
        if authority[2] is not None and not 1 <= int(authority[2]) <= 65_535:
            return "has a port outside 1 to 65535"
        try:
            address = host_literal(authority[1])
        except ValueError as error:
            return f"has no usable host: {error}"
        if address is not None and not self._addresses.permits(address):
            return "must not name an address that is not public"
        return None


def check_openrelay(value: object, *, endpoint: str, workflows_enabled: bool, policy: UrlPolicy) -> None:
    """Raise ConfigFault unless `body.openrelay` is usable; `value` is its parsed JSON."""
    if not isinstance(value, Mapping):
        raise ConfigFault(RecordCode.INVALID_OPENRELAY, "openrelay", "openrelay must be an object")
    for key in value:
        if key not in ("tool_config", "workflow"):
            raise ConfigFault(
                RecordCode.INVALID_OPENRELAY,
                f"openrelay.{key[:64]}",
                "openrelay has an unknown key; known are tool_config and workflow",
            )
    if len(value) == 2:
        raise ConfigFault(
            RecordCode.INVALID_OPENRELAY,
            "openrelay",
            "openrelay has both tool_config and workflow; a record has at most one of them",
        )
    if "tool_config" in value:
        fields = _Fields(value["tool_config"], RecordCode.INVALID_TOOL_CONFIG, "tool_config", policy)
        if endpoint != "/v1/chat/completions":
            raise fields.fault("", f"is not available on {endpoint}")
        _tool_config(fields, None)
    if "workflow" in value:
        _workflow(_Fields(value["workflow"], RecordCode.INVALID_WORKFLOW, "workflow", policy), None)
        if not workflows_enabled:
            raise ConfigFault(
                RecordCode.WORKFLOW_NOT_ENABLED,
                "openrelay.workflow",
                "workflows are not enabled for this organization",
            )


def decode_openrelay(data: bytes) -> ToolConfig | WorkflowConfig | None:
    """The configuration in the bytes of an `openrelay` object that passed `check_openrelay`."""
    value = parse(data)
    assert isinstance(value, dict)
    raw = msgspec.json.decode(data, type=dict[str, dict[str, msgspec.Raw]])
    for key, parts in raw.items():
        context = bytes(parts["context"]) if "context" in parts else None
        if key == "tool_config":
            return _tool_config(_Fields(value[key], RecordCode.INVALID_TOOL_CONFIG, key, None), context)
        return _workflow(_Fields(value[key], RecordCode.INVALID_WORKFLOW, key, None), context)
    return None


def _tool_config(fields: _Fields, context: bytes | None) -> ToolConfig:
    fields.known("type", "url", "authorization", "context", "max_rounds", "timeout_ms")
    kind = fields.values.get("type", "http")
    if kind not in ("http", "mcp"):
        raise fields.fault("type", 'must be "http" or "mcp"')
    return ToolConfig(
        type=kind,
        url=fields.url(),
        authorization=fields.authorization(),
        context=fields.context(context),
        max_rounds=fields.number("max_rounds", DEFAULT_ROUNDS, MAX_ROUNDS),
        timeout_ms=fields.number("timeout_ms", DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS),
    )


def _workflow(fields: _Fields, context: bytes | None) -> WorkflowConfig:
    fields.known("url", "authorization", "context", "timeout_ms", "max_steps", "max_requests", "max_tokens")
    return WorkflowConfig(
        url=fields.url(),
        authorization=fields.authorization(),
        context=fields.context(context),
        timeout_ms=fields.number("timeout_ms", DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS),
        max_steps=fields.number("max_steps", DEFAULT_STEPS, MAX_STEPS),
        max_requests=fields.number("max_requests", DEFAULT_REQUESTS, MAX_REQUESTS),
        max_tokens=fields.number("max_tokens", DEFAULT_TOKENS, MAX_TOKENS),
    )


class _Fields:
    """Reads the fields both kinds share; every fault names the field."""

    def __init__(self, value: object, code: str, name: str, policy: UrlPolicy | None) -> None:
        self._code = code
        self._name = name
        self._policy = policy
        if not isinstance(value, dict):
            raise self.fault("", "must be an object")
        self.values: dict[str, object] = value

    def fault(self, field: str, message: str) -> ConfigFault:
        path = f"{self._name}.{field}" if field else self._name
        return ConfigFault(self._code, f"openrelay.{path}", f"{path} {message}")

    def known(self, *names: str) -> None:
        for key in self.values:
            if key not in names:
                raise self.fault(key[:64], f"is not known; known are {', '.join(names)}")

    def url(self) -> str:
        url = self.values.get("url")
        if self._policy is not None and (why := self._policy.fault(url)) is not None:
            raise self.fault("url", why)
        assert isinstance(url, str)
        return url

    def authorization(self) -> str | None:
        if "authorization" not in self.values:
            return None
        value = self.values["authorization"]
        if not isinstance(value, str) or _PRINTABLE.fullmatch(value) is None:
            raise self.fault("authorization", "must be printable ASCII without spaces around it")
        if len(value) > MAX_AUTHORIZATION:
            raise self.fault("authorization", f"is longer than {MAX_AUTHORIZATION} characters")
        return value

    def context(self, raw: bytes | None) -> bytes | None:
        if "context" in self.values and not isinstance(self.values["context"], dict):
            raise self.fault("context", "must be an object")
        return raw

    def number(self, field: str, default: int, most: int) -> int:
        value = self.values.get(field, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fault(field, "must be an integer of at least 0")
        return min(value, most) or default
