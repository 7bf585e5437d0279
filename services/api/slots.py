"""Places for bodies under way, of which each organization gets a fair part."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from schemas.ids import OrganizationId
from services.api.refusals import Refusal

SHARE = 2


class Slots:
    """An organization gets a further place while it has fewer than `SHARE` times as many as are free.

    So one alone may have two thirds of them, several share in equal parts, and however many they take, some
    are left for whoever comes next.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._taken: Counter[OrganizationId] = Counter()

    @contextlib.contextmanager
    def take(self, organization: OrganizationId) -> Iterator[None]:
        """One place; 429 when there is none for this organization."""
        if self._taken[organization] >= SHARE * self._free:
            raise Refusal(429, "Too many uploads are running; try again shortly.", code="too_many_uploads")
        self._free -= 1
        self._taken[organization] += 1
        try:
            yield
        finally:
            self._free += 1
            self._taken[organization] -= 1
            if not self._taken[organization]:
                del self._taken[organization]
