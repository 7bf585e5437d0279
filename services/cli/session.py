"""What the commands of `orl` share: the client for the server in use, and the `--json` option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from cyclopts import Parameter

from services.cli import credentials
from services.cli.client import Client, Exit, Refused, Trouble
from services.cli.output import say

_SAY_IT = "set OPENRELAY_CONTROL_URL, or store it with `orl auth login --control-url URL`"

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]


def target() -> credentials.Target:
    """The server in use. Raises NoCredentials, BadUrl."""
    return credentials.resolve(credentials.places())


def open_client() -> Client:
    """A client for the inference host in use."""
    return client_for(target())


def client_for(server: credentials.Target) -> Client:
    return _client(server.base_url, server)


def _client(base_url: str, server: credentials.Target) -> Client:
    where = credentials.places()
    return Client(base_url, server.api_key, say=say, killed=lambda: credentials.killed_stack(where, server))


@contextmanager
def open_control() -> Iterator[Client]:
    """A client for the control host in use; where that was guessed, a failure says so and what to do."""
    server = target()
    if server.control_url is None:
        raise Trouble(f"Nothing says where the control host is: {_SAY_IT}.", Exit.USAGE)
    with _client(server.control_url, server) as client:
        try:
            yield client
        except Trouble as trouble:
            absent = isinstance(trouble, Refused) and trouble.status == 404
            if not server.control_guessed or not (absent or trouble.exit_status is Exit.NETWORK):
                raise
            raise Trouble(
                f"The control host was looked for at {server.control_url}, the port after that of "
                f"{server.base_url}: {trouble} If it is elsewhere, {_SAY_IT}.",
                trouble.exit_status,
            ) from trouble
