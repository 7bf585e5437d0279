"""Whether calls can be sent to a model server at all, as it stands in the settings.

Each fault is worded for who writes the settings and repeats nothing of them: both fields may hold secrets.
"""

from __future__ import annotations

import re
from functools import lru_cache

from yarl import URL

from streams.core.addresses import host_literal

MAX_HOST = 253
"""Characters of a name; more the name system cannot carry."""

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?", re.ASCII | re.IGNORECASE)


def key_fault(api_key: str | None) -> str | None:
    """Why a key cannot be sent, None when it can."""
    if api_key is None or (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        return None
    return (
        "must be printable ASCII without spaces around it: "
        "look for a line break at its end, as a key read from a file has"
    )


def url_fault(base_url: str, api_key: str | None = None) -> str | None:
    """Why nothing can be sent to this URL with this key, None when it can."""
    if not base_url.isprintable() or " " in base_url:
        return "must have no spaces, line breaks or invisible characters"
    try:
        url = URL(base_url)
    except ValueError:
        return "must be an http or https URL, with a host that is one and a port from 1 to 65535"
    if url.scheme not in ("http", "https") or not url.raw_host:
        return "must be an http or https URL"
    if url.port == 0:
        return "must have a port from 1 to 65535, or none"
    if url.raw_query_string or url.raw_fragment or base_url.endswith(("?", "#")):
        return "must end with its path, usually /v1: leave out ? and # and what follows"
    return _host_fault(url.raw_host) or _user_fault(url, api_key)


@lru_cache(maxsize=1_024)
def fault(base_url: str, api_key: str | None) -> str | None:
    """Why nothing can be sent to a server with these settings, None when it can."""
    if wrong := url_fault(base_url, api_key):
        return f"its base_url {wrong}"
    if wrong := key_fault(api_key):
        return f"its api_key {wrong}"
    return None


def _host_fault(host: str) -> str | None:
    try:
        if host_literal(f"[{host.partition('%')[0]}]" if ":" in host else host) is not None:
            return None
    except ValueError as error:
        return f"must name a host that is one: {error}"
    name = host.removesuffix(".")
    if len(name) > MAX_HOST or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        return (
            "must name a host that is one: "
            f"letters, digits, - and _ between dots, at most {MAX_HOST} characters"
        )
    return None


def _user_fault(url: URL, api_key: str | None) -> str | None:
    if url.raw_user is None and url.raw_password is None:
        return None
    if api_key is not None:
        return "has a user or password, and there is an api_key: leave one out, only one can be sent"
    user, password = url.user or "", url.password or ""
    if ":" in user or not (user + password).isascii() or not (user + password).isprintable():
        return "must have a user without colons, and a user and password of printable ASCII"
    return None
