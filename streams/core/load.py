"""How busy a vLLM server says it is, from its `/metrics`."""

from __future__ import annotations

import re
from typing import NamedTuple

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PREEMPTIONS = "vllm:num_preemptions_total"


class Load(NamedTuple):
    """Requests running and waiting, share of the KV cache in use (0 to 1), preemptions since it started."""

    running: int
    waiting: int
    cache: float
    preemptions: int


def parse(text: str) -> Load | None:
    """The load in a Prometheus exposition; None when it is not one of vLLM's. Engines and models add up."""
    sums: dict[str, float] = {}
    cache = 0.0
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if name in _CACHE:
            cache = max(cache, number)
        else:
            sums[name] = sums.get(name, 0.0) + number
    if _RUNNING not in sums or _WAITING not in sums:
        return None
    return Load(int(sums[_RUNNING]), int(sums[_WAITING]), cache, int(sums.get(_PREEMPTIONS, 0)))
