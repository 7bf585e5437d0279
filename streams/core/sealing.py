"""Sealing what customers entrust to us on its way through the log: AES-256-GCM under keys from the settings.

A sealed value is `nonce (12) | ciphertext and tag`, bound to the record it belongs to. The first key seals,
every key opens, so keys are rotated by putting a new one in front.
"""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from schemas.ids import BatchId
from schemas.settings import Secrets

NONCE_BYTES = 12


class Unsealable(Exception):
    """None of the keys opens the value, or it belongs to another record."""


class Sealer:
    def __init__(self, secrets: Secrets) -> None:
        self._keys = [AESGCM(base64.b64decode(key)) for key in secrets.keys]

    def seal(self, plain: bytes, batch: BatchId, index: int, nonce: bytes) -> bytes:
        """`nonce` is 12 random bytes, never used before."""
        return nonce + self._keys[0].encrypt(nonce, plain, _bound_to(batch, index))

    def open(self, sealed: bytes, batch: BatchId, index: int) -> bytes:
        """The plain bytes; raises Unsealable."""
        nonce, data = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        for key in self._keys:
            try:
                return key.decrypt(nonce, data, _bound_to(batch, index))
            except InvalidTag:
                continue
        raise Unsealable(f"record {index} of {batch}: no key opens it")


def _bound_to(batch: BatchId, index: int) -> bytes:
    return f"{batch}:{index}".encode()
