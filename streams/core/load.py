"""How busy a vLLM server says it is, from its `/metrics`.

What it says is somebody else's: a number that is none, or cannot be a count, makes what it stands for
unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PREEMPTIONS = "vllm:num_preemptions_total"
_NAMES = (_RUNNING, _WAITING, *_CACHE, _PREEMPTIONS)

_SAMPLE = re.compile(r'(vllm:\w++)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?[ \t]++(\S++)', re.ASCII)
"""One line, read once from left to right whatever is in it."""

_NUMBER = re.compile(r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
LONGEST_NUMBER = 64
LARGEST_COUNT = 2**53
"""Larger ones are not counted one by one any more."""


class Load(NamedTuple):
    """Requests running and waiting, share of the KV cache in use (0 to 1), preemptions since it started."""

    running: int
    waiting: int
    cache: float
    preemptions: int


def parse(text: str) -> Load | None:
    """The load in a Prometheus exposition, None when it tells none. Engines and models add up."""
    sums: dict[str, float] = {}
    unknown: set[str] = set()
    cache = 0.0
    for line in text.split("\n"):
        if not line.startswith(_NAMES) or (sample := _SAMPLE.match(line)) is None:
            continue
        name, number = sample[1], _count(sample[2])
        if number is None:
            unknown.add(name)
        elif name in _CACHE:
            cache = max(cache, min(number, 1.0))
        else:
            sums[name] = sums.get(name, 0.0) + number
    if not {_RUNNING, _WAITING} <= sums.keys() - unknown:
        return None
    preemptions = 0.0 if _PREEMPTIONS in unknown else sums.get(_PREEMPTIONS, 0.0)
    return Load(int(sums[_RUNNING]), int(sums[_WAITING]), cache, int(preemptions))


def _count(text: str) -> float | None:
    """A number from zero to LARGEST_COUNT."""
    if len(text) > LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if number <= LARGEST_COUNT else None
