"""Who calls: an API key to its organization, role and features."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from schemas.facts import KeyRole
from schemas.ids import OrganizationId
from schemas.settings import Organization
from services.api import keys, refusals

MAX_KEY_LENGTH = 512


class Principal(msgspec.Struct, frozen=True):
    organization: OrganizationId
    role: KeyRole
    key_id: str
    features: frozenset[str]

    @property
    def may_batch(self) -> bool:
        """Batch and file routes exist for this caller. A finance key sees usage and nothing else."""
        return "batch" in self.features and self.role is not KeyRole.FINANCE


class IssuedKey(msgspec.Struct, frozen=True):
    """What is known of an issued key that is not revoked."""

    key_id: str
    organization: OrganizationId
    role: KeyRole


class Principals:
    """Keys of the settings, taken as written, and issued keys by their fingerprint."""

    def __init__(
        self, organizations: Iterable[Organization], issued: Callable[[str], IssuedKey | None]
    ) -> None:
        self._features = {each.id: frozenset(each.features) for each in organizations}
        self._configured = {
            keys.fingerprint(key): IssuedKey(keys.key_id(key), OrganizationId(each.id), KeyRole.ORGANIZATION)
            for each in organizations
            for key in each.api_keys
        }
        self._issued = issued

    def authenticate(self, key: str | None) -> Principal:
        """The caller behind a key. Every key that is not good is refused in the same words."""
        if key is None or not 0 < len(key) <= MAX_KEY_LENGTH:
            raise refusals.invalid_key()
        fingerprint = keys.fingerprint(key)
        known = self._configured.get(fingerprint)
        if known is None and keys.well_formed(key):
            known = self._issued(fingerprint)
        if known is None:
            raise refusals.invalid_key()
        features = self._features.get(known.organization, frozenset({"batch"}))
        return Principal(known.organization, known.role, known.key_id, features)


def presented_key(headers: dict[bytes, bytes]) -> str | None:
    """The key of a request, from `Authorization: Bearer` or, without that header, from `x-api-key`."""
    authorization = headers.get(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.decode("latin-1").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    key_header = headers.get(b"x-api-key")
    return None if key_header is None else key_header.decode("latin-1").strip()
