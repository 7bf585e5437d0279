"""`orl auth`: which server, which key."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Annotated

from cyclopts import App, Parameter

from services.cli import credentials
from services.cli.client import Client, Exit, Trouble
from services.cli.credentials import DEFAULT_BASE_URL
from services.cli.output import print_json, print_table, say
from services.cli.session import Json, open_client, target

app = App(name="auth", help="Log in and out.")


@app.command
def login(
    *,
    with_token: Annotated[bool, Parameter(negative="")] = False,
    base_url: str | None = None,
    control_url: str | None = None,
) -> int:
    """Store an API key for a server.

    Parameters
    ----------
    with_token
        Read the key from standard input instead of asking for it.
    base_url
        The server, up to and with /v1; default: OPENRELAY_BASE_URL, else the hosted service.
    control_url
        The server's control host, which serves usage and lag; default: OPENRELAY_CONTROL_URL.
    """
    url = credentials.normal_base_url(base_url or os.environ.get("OPENRELAY_BASE_URL") or DEFAULT_BASE_URL)
    if with_token:
        key = sys.stdin.readline().strip()
    elif sys.stdin.isatty():
        key = getpass.getpass(f"API key for {url}: ").strip()
    else:
        raise Trouble("There is no terminal to ask on: give the key with --with-token.", Exit.USAGE)
    if not credentials.is_key(key):
        raise Trouble(
            "That is not an API key: it is empty, or has other than printable ASCII characters.", Exit.USAGE
        )
    where = credentials.places()
    try:
        with Client(url, key) as client:
            client.get("/models")
    except Trouble as trouble:
        if trouble.exit_status is not Exit.NETWORK:
            raise
        say(f"orl: the key could not be tried: {trouble}")
    credentials.store(where, url, key, control_url or os.environ.get("OPENRELAY_CONTROL_URL"))
    say(f"stored the key for {url} in {where.credentials}")
    return Exit.OK


@app.command
def logout(*, base_url: str | None = None) -> int:
    """Remove a stored key, by default that of the server in use."""
    url = credentials.forget(credentials.places(), base_url and credentials.normal_base_url(base_url))
    if url is None:
        raise Trouble("No such key is stored.", Exit.USAGE)
    say(f"removed the key for {url}")
    return Exit.OK


@app.command
def status(*, json: Json = False) -> int:
    """Show which server is in use, and whether it takes the key."""
    server = target()
    with open_client() as client:
        models = [model["id"] for model in client.get("/models")["data"]]
    if json:
        print_json({"base_url": server.base_url, "control_url": server.control_url, "models": models})
    else:
        print_table(["", ""], [("server", server.base_url), ("models", ", ".join(models))])
    return Exit.OK
