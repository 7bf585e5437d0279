"""Telling when a key was last used: a fact now and then, not one a request."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from schemas import topics
from schemas.facts import KeyUsed
from services.api.writing import FactWriter

SAY_EVERY_S = 60.0
"""Per key and process."""


class KeyUse:
    """For one event loop. `now` is a monotonic clock."""

    def __init__(self, facts: FactWriter, now: Callable[[], float] = time.monotonic) -> None:
        self._facts = facts
        self._now = now
        self._said: dict[str, float] = {}

    def note(self, key_id: str) -> None:
        """The key was good for a request. Nobody waits for the fact, and one that is lost is no loss."""
        now = self._now()
        if now < self._said.get(key_id, float("-inf")) + SAY_EVERY_S:
            return
        self._said[key_id] = now
        self._facts.mention(topics.KEYS, f"{key_id}:used", msgspec.json.encode(KeyUsed(key_id=key_id)), 0)
