"""Which batch a create request is about, when it may have been sent before.

A request that can be repeated is known by its scope: the organization and the Idempotency-Key, or the
organization and the hash of the body (the SDK repeats a POST without a key, saying that it does). Whoever
creates first appends a claim; the first claim of a scope that still counts decides the batch's id for
everybody, on every instance, since the log has one order. A claim counts for its scope's time, and not once
its batch was withdrawn. Whether the batch then exists is another matter: a claim whose creator was refused
or died is taken over by the next one, under the same id, and of several `created` facts the first holds.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import msgspec

from schemas import ids, topics
from schemas.facts import Claim
from schemas.ids import BatchId, FileId, OrganizationId
from services.api.readmodel import ReadModel
from services.api.writing import FactWriter

KEY_COUNTS_MS = 24 * 3_600_000
BODY_COUNTS_MS = 30 * 60_000


class Scope(msgspec.Struct, frozen=True):
    """What makes two requests the same. With `repeats` False only this request itself is meant."""

    name: str
    body_sha256: str
    counts_ms: int
    repeats: bool


def scope_of(organization: OrganizationId, key: str | None, body_sha256: str, retries: int) -> Scope:
    """`retries` is what the SDK says of how often it has sent this request before."""
    if key is not None:
        # Hashed, so that no organization's name with a colon in it and another's key come out the same.
        hashed = hashlib.sha256(key.encode()).hexdigest()
        return Scope(f"key:{organization}:{hashed}", body_sha256, KEY_COUNTS_MS, True)
    return Scope(f"body:{organization}:{body_sha256}", body_sha256, BODY_COUNTS_MS, retries > 0)


class Claims:
    def __init__(self, model: ReadModel, facts: FactWriter, partitions: int) -> None:
        self._model = model
        self._facts = facts
        self._partitions = partitions

    async def settle(self, scope: Scope, input_file: FileId) -> Claim:
        """The claim under which this request goes on: its `batch` is the batch the request is about.

        The caller holds the scope's lock, so within this process nobody else is at it. `input_file` is the
        id of the input, or the one it will get if the request carries its records.
        """
        await self._model.barrier()
        leader = self._leader(scope) if scope.repeats else None
        if leader is not None and (self._created(leader) or leader.body_sha256 == scope.body_sha256):
            return leader
        claim = Claim(
            claim=f"claim_{secrets.token_hex(16)}",
            scope=scope.name,
            body_sha256=scope.body_sha256,
            batch=leader.batch if leader else ids.batch_id(secrets.token_bytes(ids.ENTROPY_BYTES)),
            input_file_id=input_file,
        )
        await self._facts.append(
            topics.CLAIMS,
            scope.name,
            msgspec.json.encode(claim),
            topics.partition_of(scope.name, self._partitions),
        )
        if not scope.repeats:
            return claim
        await self._model.barrier()
        leader = self._leader(scope)
        if leader is None or leader.batch == claim.batch:
            return claim
        if self._created(leader) or leader.body_sha256 == scope.body_sha256:
            return leader
        return msgspec.structs.replace(claim, batch=leader.batch)

    def winner(self, batch: BatchId) -> Claim | None:
        """The claim under which a batch was created."""
        state = self._model.batch(batch)
        if state is None or state.created is None:
            return None
        return self._model.claim(state.created.claim)

    def _created(self, claim: Claim) -> bool:
        state = self._model.batch(claim.batch)
        return state is not None and state.exists

    def _leader(self, scope: Scope) -> Claim | None:
        now_ms = time.time_ns() // 1_000_000
        for placed in self._model.claims(scope.name):
            if now_ms - placed.at_ms <= scope.counts_ms:
                state = self._model.batch(placed.claim.batch)
                if state is None or not state.withdrawn:
                    return placed.claim
        return None
