"""Issued keys as topic `keys` tells of them."""

from __future__ import annotations

import threading

import msgspec

from schemas.facts import KeyFact, KeyIssued, KeyRevoked, KeyUsed
from services.api.principals import IssuedKey
from streams.kafka.messages import Message


class IssuedKeys:
    """A fold in memory. `apply` is called by the follower's thread, `find` by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_fingerprint: dict[str, KeyIssued] = {}
        self._revoked: set[str] = set()
        self._decode = msgspec.json.Decoder(KeyFact).decode

    def apply(self, messages: list[Message]) -> None:
        """The first issue of a key holds; a revocation always does, in whatever order they come."""
        for message in messages:
            if message.value is None:
                continue
            fact = self._decode(message.value)
            with self._lock:
                match fact:
                    case KeyIssued():
                        self._by_fingerprint.setdefault(fact.sha256, fact)
                    case KeyRevoked():
                        self._revoked.add(fact.key_id)
                    case KeyUsed():
                        pass

    def find(self, fingerprint: str) -> IssuedKey | None:
        """The key with this fingerprint, if it is good."""
        with self._lock:
            found = self._by_fingerprint.get(fingerprint)
            if found is None or found.key_id in self._revoked:
                return None
            return IssuedKey(found.key_id, found.organization, found.role)
