"""Whether a file was deleted or used first.

Uses and deletions of a file lie in one partition, so each deletion and each use have an order. A deletion is
written by somebody who knew every use below an offset and had found them all over. It holds if there was no
further one: whoever used the file in between finds it untouched, and whoever comes later finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterable


def holds(seen: int | None, offset: int, uses: Iterable[int]) -> bool:
    """Whether a deletion at `offset`, written with knowledge up to `seen`, counts among uses at `uses`."""
    return seen is None or not any(seen <= use < offset for use in uses)
