"""Watching the endpoints that have calls: one whose health is gone loses them to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from streams.pools.endpoint import Endpoint
from streams.pools.openai import OpenAIClient
from streams.pools.pool import ModelPool

EVERY_S = 2.0
SICK_AFTER = 3
"""Checks in a row that fail before an endpoint's calls are given up."""

log = structlog.get_logger("openrelay.dispatch")


async def watch(pools: Mapping[str, ModelPool], client: OpenAIClient) -> None:
    """Runs until cancelled."""
    sick: dict[Endpoint, int] = {}
    while True:
        await asyncio.sleep(EVERY_S)
        busy = [endpoint for pool in pools.values() for endpoint in pool.endpoints if endpoint.in_flight]
        answers = await asyncio.gather(*(client.healthy(endpoint) for endpoint in busy))
        sick = {
            endpoint: 0 if healthy else sick.get(endpoint, 0) + 1
            for endpoint, healthy in zip(busy, answers, strict=True)
        }
        for endpoint, times in sick.items():
            if times == SICK_AFTER:
                log.warning("endpoint sick", endpoint=endpoint.base_url, calls=endpoint.in_flight)
                endpoint.put_out(asyncio.get_running_loop().time())
                client.give_up(endpoint)
