"""How many records of an organization may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schemas.ids import OrganizationId
from services.api.refusals import Refusal


class Quota:
    """`waiting` says how many records of batches that have not ended an organization has."""

    def __init__(self, most: int, waiting: Callable[[str], int]) -> None:
        self._most = most
        self._waiting = waiting
        self._reserved: dict[OrganizationId, int] = {}

    def check(self, organization: OrganizationId) -> None:
        """Refuse when not one more record may wait."""
        with self.hold(organization, 1):
            pass

    @contextmanager
    def hold(self, organization: OrganizationId, records: int) -> Iterator[None]:
        """Keep room for `records` more, or refuse.

        Creates under way count, so that several at once do not pass together; once a batch is in the read
        model it counts there.
        """
        reserved = self._reserved.get(organization, 0)
        if records > self._most:
            raise Refusal(
                429,
                f"The batch has {records:,} records, and at most {self._most:,} of an organization may wait "
                "at a time: it will never fit. Split it into several batches.",
                code="quota_exceeded",
                headers={"x-should-retry": "false"},
            )
        waiting = self._waiting(organization) + reserved
        if records and waiting + records > self._most:
            raise Refusal(
                429,
                f"At most {self._most:,} records may wait at a time, and {waiting:,} do. "
                "Try again when a batch has ended.",
                code="quota_exceeded",
            )
        self._reserved[organization] = reserved + records
        try:
            yield
        finally:
            self._reserved[organization] -= records
            if not self._reserved[organization]:
                del self._reserved[organization]
