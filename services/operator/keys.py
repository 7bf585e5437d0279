"""API keys: issued once, known by their fingerprint only, revoked for good.

A key exists when its `issued` fact is acknowledged, and is good for nothing from the moment a `revoked` fact
is read, which every API process and the control host do at once. Keys that settings list are taken as
written and are revoked by taking them out of there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from schemas import topics
from schemas.facts import KeyFact, KeyIssued, KeyRevoked, KeyRole, KeyUsed
from schemas.ids import OrganizationId
from schemas.settings import Organization, Settings
from services.api import keys
from services.operator.log import CLIENT_ID, Log
from streams.kafka.messages import Message
from streams.kafka.producer import Producer

ACK_TIMEOUT_S = 20.0

_decode = msgspec.json.Decoder(KeyFact).decode


class KeyRefused(Exception):
    """The command makes no sense; the message says why."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key. Times are Unix milliseconds; None: not known, or not yet."""

    id: str
    hint: str
    organization: str
    role: str
    name: str
    source: str
    """`issued`, or `settings` for one that is listed there."""
    created_at_ms: int | None
    last_used_at_ms: int | None
    revoked_at_ms: int | None


class Issued(msgspec.Struct, frozen=True):
    """A new key, and its text, which nobody can show again."""

    id: str
    organization: str
    role: str
    name: str
    key: str


def create(settings: Settings, organization: str, role: KeyRole, name: str) -> Issued:
    """Issue a key. Raises KeyRefused, KafkaFailed."""
    known = [each.id for each in settings.organizations]
    if organization not in known:
        raise KeyRefused(
            f"there is no organization {organization!r} in the settings; "
            f"there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"
        )
    key = keys.make(secrets.token_bytes(keys.ENTROPY_BYTES))
    fact = KeyIssued(
        key_id=keys.key_id(key),
        sha256=keys.fingerprint(key),
        organization=OrganizationId(organization),
        role=role,
        name=name,
        hint=keys.hint(key),
    )
    _append(settings, fact)
    return Issued(fact.key_id, organization, role.value, name, key)


def revoke(settings: Settings, key_id: str) -> Key:
    """Revoke a key; doing so again is fine. Raises KeyRefused, KafkaFailed."""
    for key in listed(settings):
        if key.id != key_id:
            continue
        if key.source == "settings":
            raise KeyRefused(f"{key_id} is listed in the settings of {key.organization}: take it out there")
        if key.revoked_at_ms is None:
            _append(settings, KeyRevoked(key_id=key_id))
        return key
    raise KeyRefused(f"no key {key_id} was ever issued; `openrelay keys list` shows all of them")


def listed(settings: Settings) -> list[Key]:
    """All keys, the newest last. Raises KafkaFailed."""
    with Log(settings.kafka) as log:
        return fold(settings.organizations, log.partition(topics.KEYS, 0))


def fold(organizations: Iterable[Organization], messages: Iterable[Message]) -> list[Key]:
    """Keys from the settings, then issued ones in the order of their issue."""
    found: dict[str, Key] = {}
    for organization in organizations:
        for key in organization.api_keys:
            found[keys.key_id(key)] = Key(
                id=keys.key_id(key),
                hint=keys.hint(key),
                organization=organization.id,
                role=KeyRole.ORGANIZATION.value,
                name="",
                source="settings",
                created_at_ms=None,
                last_used_at_ms=None,
                revoked_at_ms=None,
            )
    revoked: dict[str, int] = {}
    used: dict[str, int] = {}
    for message in messages:
        if message.value is None:
            continue
        match _decode(message.value):
            case KeyIssued() as fact:
                found.setdefault(fact.key_id, _issued(fact, message.timestamp_ms))
            case KeyRevoked(key_id=key_id):
                revoked.setdefault(key_id, message.timestamp_ms)
            case KeyUsed(key_id=key_id):
                used[key_id] = message.timestamp_ms
    return [
        msgspec.structs.replace(key, last_used_at_ms=used.get(key.id), revoked_at_ms=revoked.get(key.id))
        for key in found.values()
    ]


def _issued(fact: KeyIssued, at_ms: int) -> Key:
    return Key(
        id=fact.key_id,
        hint=fact.hint,
        organization=fact.organization,
        role=fact.role.value,
        name=fact.name,
        source="issued",
        created_at_ms=at_ms,
        last_used_at_ms=None,
        revoked_at_ms=None,
    )


def _append(settings: Settings, fact: KeyIssued | KeyRevoked) -> None:
    producer = Producer(settings.kafka, CLIENT_ID)
    try:
        key = f"{fact.key_id}:{fact.__struct_config__.tag}"
        producer.send(topics.KEYS, msgspec.json.encode(fact), key=key, partition=0)
        producer.flush(ACK_TIMEOUT_S)
    finally:
        producer.close()
