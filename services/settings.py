"""From a settings file and `OPENRELAY_` variables to one checked `Settings` tree.

`read_tree` merges the file (TOML, or JSON by its suffix) with the environment into plain tables; `checked`
turns tables into structs, strictly; `validate` knows the rules that types do not show. `load` is all three.
Faults are collected, never reported one by one, and each names its key the way a person would write it
(`limits.max_attempts`).

A variable is a setting when its name has two underscores between levels (`OPENRELAY_LIMITS__DRAIN_S=5`) or
is a key of the top level (`OPENRELAY_MODELS={"m": {...}}`). Values are JSON where the field is not text.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import json
import os
import tempfile
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import platformdirs

from schemas.settings import Model, Organization, Pool, Settings
from streams.pools.places import key_fault, url_fault

PREFIX = "OPENRELAY_"
FEATURES = ("batch", "workflows")
KEY_PREFIXES = ("or_", "vl_")
MIN_KEY_CHARACTERS = 16
SECRET_BYTES = 32
STORAGE_SCHEMES = ("file", "s3", "gs", "az")
BUCKET_SIGNATURE_S = 7 * 24 * 3600
"""The longest a bucket takes a signed URL."""

Tree = dict[str, Any]


class SettingsError(Exception):
    """The settings cannot be used. One line for each fault, all of them."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of one process; raises SettingsError with every fault."""
    tree = read_tree(path, os.environ if environ is None else environ)
    tree.setdefault("data_dir", str(default_data_dir()))
    return checked(tree)


def checked(tree: Tree) -> Settings:
    """Structs from a complete tree, no key unknown and no type bent; raises SettingsError with every fault.

    Faults of form are looked for table by table, since the decoder itself stops at the first. They do not
    hide faults of meaning elsewhere: those are looked for in what is left of the tree.
    """
    faults = list(_faults(tree, Settings, ""))
    broken = tuple(fault.split(": ")[0] + end for fault in faults for end in ":.[")
    settings = msgspec.convert(_mended(tree, Settings), Settings)
    faults += (fault for fault in validate(settings) if not fault.startswith(broken))
    if faults:
        raise SettingsError(faults)
    return settings


def default_data_dir() -> Path:
    return platformdirs.user_data_path("openrelay")


def read_tree(path: Path | None, environ: Mapping[str, str]) -> Tree:
    """The file's tables with the variables laid over them; nothing is checked but syntax."""
    tree = {} if path is None else _parse(path)
    faults: list[str] = []
    for name in sorted(filter(is_setting, environ)):
        keys = [key.lower() for key in name.removeprefix(PREFIX).split("__")]
        try:
            _put(tree, keys, _value(name, keys, environ[name]))
        except ValueError as fault:
            faults.append(str(fault))
    if faults:
        raise SettingsError(faults)
    return tree


def is_setting(variable: str) -> bool:
    """Whether an environment variable overrides a setting, rather than being ours for another purpose."""
    if not variable.startswith(PREFIX):
        return False
    rest = variable.removeprefix(PREFIX)
    return "__" in rest or rest.lower() in Settings.__struct_fields__


def write(settings: Settings, path: Path) -> None:
    """Store resolved settings for the processes of one stack: mode 0600, replaced by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(settings)))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _parse(path: Path) -> Tree:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: cannot be read: {error}"]) from error
    try:
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise SettingsError([f"{path}: {error}"]) from error
    if not isinstance(tree, dict):
        raise SettingsError([f"{path}: must hold a table"])
    return tree


def _put(tree: Tree, keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"{'.'.join(keys)}: {key} is not a table")
        tree = below
    tree[keys[-1]] = value


def _value(name: str, keys: list[str], text: str) -> object:
    """A variable's value: text stays text where the field is text, everything else is JSON."""
    kind: Any = Settings
    for key in keys:
        fields = (
            {field.name: field.type for field in msgspec.structs.fields(kind)} if _is_struct(kind) else {}
        )
        if key not in fields:
            raise ValueError(f"{name}: there is no setting {'.'.join(keys)}")
        kind = fields[key]
    if typing.get_origin(kind) is typing.Literal:
        return text
    if str in (kind, *typing.get_args(kind)) and typing.get_origin(kind) in (None, types.UnionType):
        return text
    try:
        return json.loads(text)
    except ValueError:
        shown = f", not {text[:40]!r}" if kind in _SCALARS else ""  # tables and lists may hold secrets
        raise ValueError(f"{name}: {'.'.join(keys)} must be {_described(kind)}{shown}") from None


_SCALARS = {int: "an integer", float: "a number", bool: "true or false"}


def _described(kind: Any) -> str:
    """What a variable has to hold."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if typing.get_origin(kind) is tuple:
        return "a list, written as JSON"
    return "a table, written as JSON"


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _faults(value: object, kind: Any, path: str) -> Iterator[str]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_struct(kind) and isinstance(value, dict):
        yield from _table_faults(value, kind, path)
    elif origin is dict and isinstance(value, dict) and _is_struct(args[1]):
        for key, item in value.items():
            yield from _faults(item, args[1], _join(path, _named(key)))
    elif origin is tuple and isinstance(value, list) and _is_struct(args[0]):
        for position, item in enumerate(value):
            yield from _faults(item, args[0], f"{path}[{position}]")
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            yield f"{path}: {error}"


def _table_faults(table: Tree, kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key in table:
        if key not in fields:
            yield f"{_join(path, key)}: unknown key"
    for name, field in fields.items():
        if name in table:
            yield from _faults(table[name], field.type, _join(path, name))
        elif field.required:
            yield f"{_join(path, name)}: missing"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _named(key: str) -> str:
    """A key the way TOML has it: quoted where it has to be."""
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)


def _mended(value: object, kind: Any) -> object:
    """The tree without what cannot be decoded; an empty value stands in for what is required."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_struct(kind):
        table = value if isinstance(value, dict) else {}
        return {
            field.name: _mended(table.get(field.name), field.type)
            for field in msgspec.structs.fields(kind)
            if field.name in table or field.required
        }
    if origin is dict and isinstance(value, dict) and _is_struct(args[1]):
        return {key: _mended(item, args[1]) for key, item in value.items()}
    if origin is tuple and isinstance(value, list) and _is_struct(args[0]):
        return [_mended(item, args[0]) for item in value]
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        if origin is typing.Literal:
            return args[0]
        return None if types.NoneType in args else (origin or kind)()
    return value


def validate(settings: Settings) -> list[str]:
    """Every fault of a decoded tree that types alone do not show, each naming its key."""
    faults: list[str] = []
    note = faults.append
    _check_edges(settings, note)
    _check_positive("limits", settings.limits, {"retry_backoff_s", "expiry_grace_s", "drain_s"}, note)
    _check_positive("http", settings.http, set(), note)
    if not 0 <= settings.metrics.port < 65_536:
        note("metrics.port: must be a port, or 0 for any")
    _check_organizations(settings.organizations, note)
    for name, model in settings.models.items():
        _check_model(f"models.{_named(name)}", name, model, note)
    return faults


def _check_edges(settings: Settings, note: Callable[[str], None]) -> None:
    for server in settings.kafka.bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            note(f"kafka.bootstrap: {server!r} is not host:port")
    for name in ("replication_factor", "partitions", "request_partitions"):
        if getattr(settings.kafka, name) < 1:
            note(f"kafka.{name}: must be at least 1")
    if not _is_http(settings.clickhouse.url):
        note("clickhouse.url: must be http://host:port or https://host:port")
    scheme, _, rest = settings.storage.url.partition("://")
    if scheme not in STORAGE_SCHEMES or not rest:
        note(f"storage.url: must start with one of {', '.join(s + '://' for s in STORAGE_SCHEMES)}")
    elif scheme == "file" and not rest.startswith("/"):
        note("storage.url: needs an absolute path: file:///dir")
    if settings.storage.presigned_puts == "bucket":
        if scheme != "s3":
            note('storage.presigned_puts: "bucket" needs a storage.url of s3://')
        if settings.limits.presign_ttl_s > BUCKET_SIGNATURE_S:
            note(f"limits.presign_ttl_s: at most {BUCKET_SIGNATURE_S} where URLs are the bucket's")
    if not settings.secrets.keys:
        note("secrets.keys: at least one key is needed")
    for position, key in enumerate(settings.secrets.keys):
        if not _is_secret(key):
            note(f"secrets.keys[{position}]: must be base64 of {SECRET_BYTES} bytes")
    if settings.http.public_url is not None and not _is_http(settings.http.public_url):
        note("http.public_url: must be an http or https URL")
    for position, cidr in enumerate(settings.egress.allow_cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            note(f"egress.allow_cidrs[{position}]: {error}")


def _check_positive(
    where: str, table: msgspec.Struct, may_be_zero: set[str], note: Callable[[str], None]
) -> None:
    """Every number of a table of limits."""
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if not isinstance(value, int | float):
            continue
        if not value < float("inf") or value < 0 or (value == 0 and name not in may_be_zero):
            note(f"{where}.{name}: must be {'zero or more' if name in may_be_zero else 'more than zero'}")


def _check_organizations(organizations: tuple[Organization, ...], note: Callable[[str], None]) -> None:
    ids: set[str] = set()
    owners: dict[str, str] = {}
    for position, organization in enumerate(organizations):
        where = f"organizations[{position}]"
        if not organization.id or not organization.id.isascii() or not organization.id.isprintable():
            note(f"{where}.id: must be printable ASCII")
        if organization.id in ids:
            note(f"{where}.id: {organization.id!r} is used twice")
        ids.add(organization.id)
        for feature in organization.features:
            if feature not in FEATURES:
                note(f"{where}.features: unknown feature {feature!r}; there are {', '.join(FEATURES)}")
        if not 0 < organization.weight < float("inf"):
            note(f"{where}.weight: must be more than zero")
        for number, key in enumerate(organization.api_keys):
            at = f"{where}.api_keys[{number}]"
            if not is_key(key):
                note(f"{at}: must start with or_ or vl_ and have at least {MIN_KEY_CHARACTERS} characters")
            if key in owners:
                note(f"{at}: already a key of {owners[key]!r}")
            owners.setdefault(key, organization.id)


def _check_model(where: str, name: str, model: Model, note: Callable[[str], None]) -> None:
    if not name:
        note(f"{where}: a model needs a name")
    for field in ("input", "cached_input", "output"):
        value = getattr(model, f"{field}_nano_usd_per_mtok")
        if value is not None and not 0 <= value < 2**63:
            note(f"{where}.{field}_nano_usd_per_mtok: must be zero or more")
    if not model.pools:
        note(f"{where}.pools: a model needs at least one pool")
    for position, pool in enumerate(model.pools):
        _check_pool(f"{where}.pools[{position}]", pool, note)


def _check_pool(where: str, pool: Pool, note: Callable[[str], None]) -> None:
    if fault := url_fault(pool.base_url, pool.api_key):
        note(f"{where}.base_url: {fault}")
    if fault := key_fault(pool.api_key):
        note(f"{where}.api_key: {fault}")
    if pool.max_concurrency < 1:
        note(f"{where}.max_concurrency: must be at least 1")


def is_key(key: str) -> bool:
    """Whether settings may list this as an API key: taken as written, only its form is checked."""
    printable = key.isascii() and key.isprintable() and " " not in key
    return key.startswith(KEY_PREFIXES) and len(key) >= MIN_KEY_CHARACTERS and printable


def _is_secret(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == SECRET_BYTES
    except (binascii.Error, ValueError):
        return False


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
