"""What the commands of `orl` share: the client for the server in use, and the `--json` option."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from services.cli import credentials
from services.cli.client import Client, Exit, Trouble
from services.cli.output import say

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]


def target() -> credentials.Target:
    """The server in use. Raises NoCredentials, BadUrl."""
    return credentials.resolve(credentials.places())


def open_client() -> Client:
    """A client for the inference host in use."""
    return client_for(target())


def client_for(server: credentials.Target) -> Client:
    return Client(server.base_url, server.api_key, say=say)


def open_control() -> Client:
    """A client for the control host in use."""
    server = target()
    if server.control_url is None:
        raise Trouble("Nothing says where the control host is: set OPENRELAY_CONTROL_URL.", Exit.USAGE)
    return Client(server.control_url, server.api_key, say=say)
