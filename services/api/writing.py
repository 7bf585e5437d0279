"""Appending facts: an answer is given only after the broker has acknowledged."""

from __future__ import annotations

import asyncio

from schemas.facts import MAX_FACT_BYTES
from services.api import refusals
from streams.kafka.messages import Delivery, DeliveryFailed
from streams.kafka.producer import AsyncProducer

ACK_TIMEOUT_S = 10.0


class Uncertain(Exception):
    """The fact was not acknowledged in time; it may or may not be in the log, now or later."""


class FactWriter:
    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer

    async def append(self, topic: str, key: str, value: bytes, partition: int) -> Delivery:
        """Append and wait; 503 when the outcome is open, which is harmless for facts that may be repeated."""
        try:
            return await self.try_append(topic, key, value, partition)
        except Uncertain:
            raise refusals.unavailable() from None

    async def try_append(self, topic: str, key: str, value: bytes, partition: int) -> Delivery:
        """Append and wait; raises Uncertain when the outcome is open."""
        assert len(value) <= MAX_FACT_BYTES
        future = self._producer.submit(topic, value, key=key, partition=partition)
        try:
            async with asyncio.timeout(ACK_TIMEOUT_S):
                return await asyncio.shield(future)
        except (TimeoutError, DeliveryFailed):
            future.add_done_callback(_retrieve)
            raise Uncertain from None

    def mention(self, topic: str, key: str, value: bytes, partition: int) -> None:
        """Append without waiting, what may as well be lost."""
        self._producer.submit(topic, value, key=key, partition=partition).add_done_callback(_retrieve)


def _retrieve(future: asyncio.Future[Delivery]) -> None:
    """The outcome of an abandoned append is of no interest any more."""
    if not future.cancelled():
        future.exception()
