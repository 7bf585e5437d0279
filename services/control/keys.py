"""Who a caller of the control host is: a key from the settings, or an issued one."""

from __future__ import annotations

import hashlib
import hmac
import threading
from typing import NamedTuple

import msgspec

from schemas.facts import KeyFact, KeyIssued, KeyRevoked, KeyRole
from schemas.settings import Settings
from streams.kafka.messages import Message


class Caller(NamedTuple):
    """`organization` is the caller's own; finance and operator keys see all."""

    organization: str
    role: KeyRole
    key_id: str


class Keys:
    """Keys by the hash of their text. `apply` is called by the follower's thread, `find` by the server."""

    def __init__(self, settings: Settings) -> None:
        self._configured = {
            _sha256(key): Caller(organization.id, KeyRole.ORGANIZATION, "settings")
            for organization in settings.organizations
            for key in organization.api_keys
        }
        self._lock = threading.Lock()
        self._issued: dict[str, KeyIssued] = {}
        self._revoked: set[str] = set()
        self._decode = msgspec.json.Decoder(KeyFact).decode

    def apply(self, messages: list[Message]) -> None:
        """Fold facts of topic `keys`; the first issue of an id holds, a revocation always does."""
        for message in messages:
            if message.value is None:
                continue
            fact = self._decode(message.value)
            with self._lock:
                match fact:
                    case KeyIssued():
                        self._issued.setdefault(fact.key_id, fact)
                    case KeyRevoked():
                        self._revoked.add(fact.key_id)

    def find(self, text: str) -> Caller | None:
        """The caller with this key, or None; the same for a revoked key as for one that never was."""
        sha256 = _sha256(text)
        configured = self._configured.get(sha256)
        if configured is not None:
            return configured
        with self._lock:
            for issued in self._issued.values():
                if hmac.compare_digest(issued.sha256, sha256) and issued.key_id not in self._revoked:
                    return Caller(issued.organization, issued.role, issued.key_id)
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def from_headers(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key a request carries, if it carries one."""
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    return x_api_key
