"""How many calls a model server takes at once: additive increase, multiplicative decrease.

The limit starts at the configured maximum, because idle GPUs cost more than a few refused calls, is cut once
per cohort of calls in flight when the server is overloaded, and grows by one for every limit's worth of good
answers while it is in use.
"""

from __future__ import annotations

DECREASE = 0.7


class Limit:
    """The adaptive limit of one endpoint. Times are seconds of any one clock."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._limit = float(maximum)
        self._cut_at = float("-inf")

    @property
    def value(self) -> int:
        return max(1, int(self._limit)) if self.maximum else 0

    def resize(self, maximum: int) -> None:
        """The hard stop changed: settings, or another share of the partitions."""
        if self._limit >= self.maximum or self._limit > maximum:
            self._limit = float(maximum)
        self.maximum = maximum

    def good(self, in_flight: int) -> None:
        """A call was answered while `in_flight` were running."""
        if in_flight >= self._limit * 0.9:
            self._limit = min(float(self.maximum), self._limit + 1 / max(1.0, self._limit))

    def overloaded(self, sent_at: float, now: float) -> None:
        """The server refused a call sent at `sent_at`; only the first of a cohort in flight counts."""
        if sent_at >= self._cut_at:
            self._limit = max(1.0, self._limit * DECREASE)
            self._cut_at = now

    def restart(self, slots: int) -> None:
        """A server that comes back after being out begins with few calls."""
        self._limit = float(max(1, min(slots, self.maximum)))

    def double(self) -> None:
        self._limit = min(float(self.maximum), self._limit * 2)
