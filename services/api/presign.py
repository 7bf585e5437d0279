"""URLs that let somebody without an API key PUT one file.

The URL says which file, for whom, how large and until when, and is signed over all of it. Any key of the
settings verifies, the first one signs, so keys can be rotated under URLs that are out.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from urllib.parse import parse_qsl, urlencode

import msgspec

from schemas.ids import FileId, OrganizationId
from schemas.settings import Secrets

_PURPOSE = b"openrelay put url 1"


class Ticket(msgspec.Struct, frozen=True):
    """Leave to PUT `bytes` bytes as `file` until `expires` (Unix seconds)."""

    file: FileId
    organization: OrganizationId
    bytes: int
    expires: int


class Signer:
    def __init__(self, secrets: Secrets) -> None:
        self._keys = {
            hashlib.sha256(_PURPOSE + raw).hexdigest()[:8]: hmac.digest(raw, _PURPOSE, "sha256")
            for raw in map(base64.b64decode, secrets.keys)
        }
        self._first = next(iter(self._keys))

    def query(self, ticket: Ticket) -> str:
        """The query string of the URL."""
        return self._query(self._first, ticket)

    def verify(self, file: str, query: str, now_s: float) -> Ticket | None:
        """The ticket behind a URL; None when anything in it was changed or its time is over.

        The query string has to be the one that was signed, to the character: of a parameter that is there
        twice, or a number in other words, two readers could make two things.
        """
        fields = dict(parse_qsl(query))
        try:
            ticket = Ticket(
                FileId(file),
                OrganizationId(fields["organization"]),
                _integer(fields["bytes"]),
                _integer(fields["expires"]),
            )
            key = fields["key"]
        except (KeyError, ValueError):
            return None
        if key not in self._keys or not hmac.compare_digest(
            self._query(key, ticket).encode(), query.encode()
        ):
            return None
        return ticket if now_s < ticket.expires else None

    def _query(self, key: str, ticket: Ticket) -> str:
        return urlencode(
            {
                "organization": ticket.organization,
                "bytes": ticket.bytes,
                "expires": ticket.expires,
                "key": key,
                "signature": self._sign(key, ticket),
            }
        )

    def _sign(self, key: str, ticket: Ticket) -> str:
        text = msgspec.json.encode(["PUT", key, *msgspec.structs.astuple(ticket)])
        return hmac.digest(self._keys[key], text, "sha256").hex()


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError(text)
    return int(text)
