"""Watching the endpoints that have calls.

One whose health is gone loses its calls to the others; one that tells its load gets a limit that fits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from streams.core.load import Load
from streams.pools.endpoint import Endpoint
from streams.pools.openai import PROBE_TIMEOUT_S, OpenAIClient
from streams.pools.pool import ModelPool

EVERY_S = 2.0
SELDOM_S = 60.0
SICK_AFTER = 3
"""Checks in a row that fail before an endpoint's calls are given up."""

log = structlog.get_logger("openrelay.dispatch")


async def fit(pools: Mapping[str, ModelPool], client: OpenAIClient) -> None:
    """Runs until cancelled. A server without metrics is asked seldom."""
    before: dict[Endpoint, Load | None] = {}
    asked_at: dict[Endpoint, float] = {}
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(EVERY_S)
        now = loop.time()
        due = [
            endpoint
            for endpoint in _busy(pools)
            if before.get(endpoint) is not None or now - asked_at.get(endpoint, -SELDOM_S) >= SELDOM_S
        ]
        loads = await asyncio.gather(*(client.load(endpoint) for endpoint in due))
        for endpoint, load in zip(due, loads, strict=True):
            asked_at[endpoint] = now
            endpoint.limit.observe(load, before.get(endpoint), endpoint.in_flight)
            before[endpoint] = load


def _busy(pools: Mapping[str, ModelPool]) -> list[Endpoint]:
    return [endpoint for pool in pools.values() for endpoint in pool.busy]


async def watch(pools: Mapping[str, ModelPool], client: OpenAIClient) -> None:
    """Runs until cancelled. One that is sick stays out of service, and is asked, until it is well again."""
    sick: dict[Endpoint, int] = {}
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(EVERY_S)
        out = [endpoint for endpoint, times in sick.items() if times >= SICK_AFTER and not endpoint.retired]
        asked = list(dict.fromkeys([*_busy(pools), *out]))
        answers = await asyncio.gather(*(client.healthy(endpoint) for endpoint in asked))
        well = {endpoint for endpoint, healthy in zip(asked, answers, strict=True) if healthy}
        for endpoint in out:
            if endpoint in well:
                log.info("endpoint well again", endpoint=endpoint.pool.address)
                endpoint.try_again(loop.time())
        sick = {endpoint: sick.get(endpoint, 0) + 1 for endpoint in asked if endpoint not in well}
        for endpoint, times in sick.items():
            if times >= SICK_AFTER:
                if times == SICK_AFTER:
                    log.warning("endpoint sick", endpoint=endpoint.pool.address, calls=endpoint.in_flight)
                endpoint.put_out(loop.time(), EVERY_S + 2 * PROBE_TIMEOUT_S)
                client.give_up(endpoint)
