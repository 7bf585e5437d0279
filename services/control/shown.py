"""The metrics of all roles at once: each process is asked, and its samples get a label `role`.

A process that does not answer is down; what it had counted is gone with it, as counters are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httpx
import msgspec
from prometheus_client import Metric, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from schemas.settings import Settings
from services.exposition import Address, addresses

ANSWER_TIMEOUT_S = 2.0


class Shown(msgspec.Struct, frozen=True):
    """What one role said; `families` is None when it did not answer."""

    role: str
    families: list[Metric] | None


async def ask(settings: Settings) -> list[Shown]:
    """What every role shows now, by name."""
    found = addresses(settings)
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        return list(await asyncio.gather(*(_ask(client, address) for address in found)))


async def _ask(client: httpx.AsyncClient, address: Address) -> Shown:
    try:
        answer = await client.get(address.url)
        answer.raise_for_status()
    except httpx.HTTPError:
        return Shown(address.role, None)
    return Shown(address.role, list(text_string_to_metric_families(answer.text)))


def own_process() -> Shown:
    """This process's memory, time and files."""
    return Shown("control", list(ProcessCollector(registry=None).collect()))


class Everything(Collector):
    """The metrics of all roles, each sample with its role; families of one name become one."""

    def __init__(self, shown: Iterable[Shown]) -> None:
        self._shown = list(shown)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for each in self._shown:
            for family in each.families or ():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, sample.labels | {"role": each.role}, sample.value)
        return merged.values()
