"""How many calls a model server takes at once: additive increase, multiplicative decrease.

The limit starts at the configured maximum, because idle GPUs cost more than a few refused calls, is cut once
per cohort of calls in flight when the server is overloaded, and grows by a step for every limit's worth of
good answers while it is in use.

A server that tells its load is believed: the limit is set so that a short queue stands at the server, enough
to keep it busy from one answer to the next call, and no more. Good answers then only win back what refusals
have taken since it was asked last.
"""

from __future__ import annotations

from streams.core.load import Load

DECREASE = 0.7
STEPS = 32
"""From the least to the maximum: a single record that is refused again and again can cut a limit to one."""

IN_USE = 0.9
"""Of the calls that may run, so many do: only then is more of any use."""

QUEUE_SHARE = 0.1
"""Of the requests a server runs, this many more may wait there, and at least `QUEUE_LEAST`."""

QUEUE_LEAST = 2
GROWTH = 1.25
"""Of the limit from one look at the load to the next, while nothing waits there and the limit is in use."""

CACHE_FULL = 0.95


class Limit:
    """The adaptive limit of one endpoint. Times are seconds of any one clock."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._limit = float(maximum)
        self._cut_at = float("-inf")
        self._most = float("inf")
        """What good answers may bring it to."""

    @property
    def value(self) -> int:
        return max(1, int(self._limit)) if self.maximum else 0

    def resize(self, maximum: int) -> None:
        """The hard stop changed: settings, or another share of the partitions."""
        if self._limit >= self.maximum or self._limit > maximum:
            self._limit = float(maximum)
        self.maximum = maximum

    def good(self, in_flight: int) -> None:
        """A call was answered while `in_flight` others were running."""
        if self._limit < self._most and in_flight + 1 >= self.value * IN_USE:
            step = max(1.0, self.maximum / STEPS)
            self._limit = min(float(self.maximum), self._most, self._limit + step / max(1.0, self._limit))

    def overloaded(self, sent_at: float, now: float) -> bool:
        """The server refused a call sent at `sent_at`; only the first of a cohort in flight counts."""
        if sent_at < self._cut_at:
            return False
        self._limit = max(1.0, self._limit * DECREASE)
        self._cut_at = now
        return True

    def observe(self, load: Load | None, before: Load | None, in_flight: int) -> None:
        """The server told its load, and `before` that the time before; None when it told none."""
        if load is None:
            self._most = float("inf")
            return
        queue = max(QUEUE_LEAST, round(load.running * QUEUE_SHARE))
        preempted = before is not None and load.preemptions > before.preemptions
        if load.waiting > queue:
            self._limit = max(1.0, self._limit * (load.running + queue) / (load.running + load.waiting))
        elif preempted:
            self._limit = max(1.0, self._limit * DECREASE)
        elif not load.waiting and load.cache < CACHE_FULL and in_flight >= self.value * IN_USE:
            self._limit = min(float(self.maximum), self._limit * GROWTH + 1)
        self._most = self._limit

    def restart(self, slots: int) -> None:
        """A server that comes back after being out begins with few calls."""
        self._limit = float(max(1, min(slots, self.maximum)))

    def double(self, most: int) -> None:
        self._limit = min(float(self.maximum), float(most), self._limit * 2)
