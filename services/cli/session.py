"""What the commands of `orl` share: the client for the server in use, and the `--json` option."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from services.cli import credentials
from services.cli.client import Client, Exit, Trouble
from services.cli.output import say

PATIENCE_S = 10.0
"""How long a command sits out a server that cannot be reached or asks for patience."""

LONG_PATIENCE_S = 300.0
"""The same for a command that takes its time anyway: waiting, downloading, creating."""

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]


def target() -> credentials.Target:
    """The server in use. Raises NoCredentials, BadUrl."""
    return credentials.resolve(credentials.places())


def open_client(*, patient: bool = False) -> Client:
    """A client for the inference host in use."""
    return client_for(target(), patient=patient)


def client_for(server: credentials.Target, *, patient: bool) -> Client:
    patience_s = LONG_PATIENCE_S if patient else PATIENCE_S
    return Client(server.base_url, server.api_key, patience_s=patience_s, say=say)


def open_control() -> Client:
    """A client for the control host in use."""
    server = target()
    if server.control_url is None:
        raise Trouble("Nothing says where the control host is: set OPENRELAY_CONTROL_URL.", Exit.USAGE)
    return Client(server.control_url, server.api_key, patience_s=PATIENCE_S, say=say)
