"""Waiting for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SLACK_S = 5.0
"""Over a time the product promises: more than a busy machine adds, less than what must be cut off takes."""


def until(condition: Callable[[], Any], timeout_s: float, otherwise: Callable[[], str] | str) -> Any:
    """Poll until `condition` gives something true and return it; fails with `otherwise` after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            said = otherwise() if callable(otherwise) else otherwise
            raise AssertionError(f"not within {timeout_s} s: {said}")
        time.sleep(0.02)
