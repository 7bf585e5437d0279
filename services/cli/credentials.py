"""Which server `orl` talks to, and with which key.

The key and the base URL are looked for in three places, the first that has one wins: the environment
(`OPENRELAY_API_KEY`, `OPENRELAY_BASE_URL`, and `OPENRELAY_CONTROL_URL` for the control host), what
`orl auth login` stored, a stack started by `openrelay up` in the data directory it takes without `--data`:
`OPENRELAY_DATA_DIR`, else this user's. A stored key is sent only to the base URL it was stored for, and the
key of a running stack only to that stack. A stack that was killed leaves its `connection.json` behind; it
does not run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec
import platformdirs

from services.embedded import left

DEFAULT_BASE_URL = "https://inference.openrelay.inc/v1"
DEFAULT_CONTROL_URL = "https://api.openrelay.inc"


class NoCredentials(Exception):
    """Nothing says where to go or with which key; the message says what to do about it."""


class BadUrl(Exception):
    """Not the address of a server."""


class Target(msgspec.Struct, frozen=True):
    """A server to talk to. `control_url` is None if nothing says where its control host is."""

    base_url: str
    api_key: str
    control_url: str | None
    control_guessed: bool = False
    """Whether it only follows from the base URL, as it does where `openrelay up` chose both ports."""


class _Login(msgspec.Struct, frozen=True):
    api_key: str
    control_url: str | None = None


class _Stored(msgspec.Struct, frozen=True):
    """The credentials file: keys by base URL, and the base URL of the last login."""

    current: str | None = None
    logins: dict[str, _Login] = {}


class _Connection(msgspec.Struct, frozen=True):
    """What `openrelay up` writes about a running stack."""

    base_url: str
    control_url: str
    api_key: str


class Places(msgspec.Struct, frozen=True):
    """Where to look: the environment and two directories."""

    environ: Mapping[str, str]
    config_dir: Path
    data_dir: Path

    @property
    def credentials(self) -> Path:
        return self.config_dir / "credentials.json"


def places() -> Places:
    """Those of this user."""
    data_dir = os.environ.get("OPENRELAY_DATA_DIR")
    return Places(
        os.environ,
        platformdirs.user_config_path("openrelay"),
        Path(data_dir).expanduser() if data_dir else platformdirs.user_data_path("openrelay"),
    )


def resolve(where: Places) -> Target:
    """The server to talk to. Raises NoCredentials, BadUrl."""
    stored = _read_stored(where.credentials)
    running = _running(where.data_dir)
    url, key = where.environ.get("OPENRELAY_BASE_URL"), where.environ.get("OPENRELAY_API_KEY")
    if url:
        base_url = normal_base_url(url)
    elif stored.current is not None:
        base_url = stored.current
    elif running is not None:
        base_url = running.base_url
    else:
        base_url = DEFAULT_BASE_URL
    login = stored.logins.get(base_url)
    here = running if running is not None and running.base_url == base_url else None
    if not key:
        key = login.api_key if login is not None else here.api_key if here is not None else None
    if not key:
        raise NoCredentials(
            f"No API key for {base_url}: run `orl auth login`, set OPENRELAY_API_KEY, "
            f"or start a local stack with `openrelay up`.{_absent(where, running)}"
        )
    key = key.strip()
    if not is_key(key):
        raise NoCredentials(
            f"The key for {base_url} is not an API key: it is empty, or has other than printable ASCII "
            "characters. Look at OPENRELAY_API_KEY, or run `orl auth login`."
        )
    control_url = where.environ.get("OPENRELAY_CONTROL_URL") or (login and login.control_url)
    if not control_url and here is not None:
        control_url = here.control_url
    if not control_url and base_url == DEFAULT_BASE_URL:
        control_url = DEFAULT_CONTROL_URL
    guessed = not control_url and (control_url := _next_port(base_url)) is not None
    return Target(base_url, key, control_url.rstrip("/") if control_url else None, guessed)


def killed_stack(where: Places, target: Target) -> str | None:
    """What to say of the stack that served `target` from this user's data directory and was killed, if so."""
    connection = _read_connection(where.data_dir)
    if connection is None or connection.base_url != target.base_url or left.runs(where.data_dir):
        return None
    return (
        f"The stack in {where.data_dir} was killed and does not run any more: start it again with "
        f"`openrelay up --data {where.data_dir}`."
    )


def store(where: Places, base_url: str, api_key: str, control_url: str | None) -> None:
    """Keep a key for its base URL, readable by this user only, and make that URL the current one."""
    stored = _read_stored(where.credentials)
    logins = {**stored.logins, base_url: _Login(api_key, control_url)}
    _write(where.credentials, _Stored(base_url, logins))


def forget(where: Places, base_url: str | None) -> str | None:
    """Drop the key of a base URL, by default the current one; returns the URL, None if there was no key."""
    stored = _read_stored(where.credentials)
    url = base_url or stored.current
    if url is None or url not in stored.logins:
        return None
    logins = {kept: login for kept, login in stored.logins.items() if kept != url}
    current = next(iter(logins), None) if stored.current == url else stored.current
    _write(where.credentials, _Stored(current, logins))
    return url


def normal_base_url(text: str) -> str:
    """The base URL without a slash at its end; `/v1` is added where a path is missing. Raises BadUrl."""
    parts = urlsplit(text.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(f"{text!r} is not an http or https URL.")
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def is_key(text: str) -> bool:
    """Whether a header could carry it; the server knows whether it is a key."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _next_port(base_url: str) -> str | None:
    """The control host of a base URL whose owner did not say: the next port, as in `openrelay up`."""
    parts = urlsplit(base_url)
    if parts.port is None:
        return None
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port + 1}"


def _read_stored(path: Path) -> _Stored:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stored)
    except FileNotFoundError:
        return _Stored()
    except (OSError, msgspec.MsgspecError) as fault:
        raise NoCredentials(f"{path} cannot be read: {fault}. Remove it and log in again.") from fault


def _write(path: Path, stored: _Stored) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(stored)))
    os.replace(partial, path)


def _running(data_dir: Path) -> _Connection | None:
    """The stack running in `data_dir`."""
    return _read_connection(data_dir) if left.runs(data_dir) else None


def _absent(where: Places, running: _Connection | None) -> str:
    """Where a stack was looked for in vain."""
    if running is not None:
        return ""
    killed = ": the last one was killed" if left.was_killed(where.data_dir) else ""
    return (
        f" None runs in {where.data_dir}{killed}; one that was started with --data DIR is found when "
        "OPENRELAY_DATA_DIR is DIR."
    )


def _read_connection(data_dir: Path) -> _Connection | None:
    try:
        return msgspec.json.decode((data_dir / "connection.json").read_bytes(), type=_Connection)
    except (OSError, msgspec.MsgspecError):
        return None
