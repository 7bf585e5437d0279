"""The form of issued API keys.

A key is `or_`, 32 base-62 characters of randomness (190 bits) and 6 of checksum, so that a typing mistake
or a key cut short is told from a key that was never issued without asking anyone. Only its SHA-256 is kept.
"""

from __future__ import annotations

import hashlib
import re
import zlib

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FORM = re.compile(r"or_([0-9A-Za-z]{32})([0-9A-Za-z]{6})")
ENTROPY_BYTES = 24
HINT_LENGTH = 9


def make(entropy: bytes) -> str:
    """A key from 24 random bytes."""
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key is made of {ENTROPY_BYTES} random bytes")
    secret = _base62(int.from_bytes(entropy, "big"), 33)[1:]
    return f"or_{secret}{_checksum(secret)}"


def well_formed(key: str) -> bool:
    """Whether this can be a key that `make` made; says nothing of whether it was issued."""
    match = _FORM.fullmatch(key)
    return match is not None and _checksum(match[1]) == match[2]


def fingerprint(key: str) -> str:
    """What is kept of a key: SHA-256 of its text, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_id(key: str) -> str:
    """A public name of the key, derived from its fingerprint."""
    return "key_" + fingerprint(key)[:16]


def hint(key: str) -> str:
    """The first characters, for people to recognize a key by."""
    return key[:HINT_LENGTH]


def _checksum(secret: str) -> str:
    return _base62(zlib.crc32(f"or_{secret}".encode()), 6)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
