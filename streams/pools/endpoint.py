"""One model server as the dispatcher sees it: slots, health, and when it may be tried again."""

from __future__ import annotations

from schemas.settings import Pool
from streams.core.judge import Server
from streams.core.limits import Limit

FAILURES_TO_EJECT = 5
"""Failing answers in a row after which an endpoint is left out while the model has others."""

FIRST_OUT_S = 0.5
LONGEST_OUT_S = 30.0
REFUSALS_TO_PAUSE = 2
"""Cohorts refused in a row, without a good answer in between, after which nothing is sent for a while."""

LONGEST_PAUSE_S = 60.0
"""However long the server asks for: it may have meant one record, and others are waiting."""


def place(model: str, pool: Pool) -> tuple[str, str | None]:
    """The server's URL, and the model's name there when it is another."""
    return pool.base_url.rstrip("/"), pool.model if pool.model != model else None


class Endpoint:
    """Times are seconds of the event loop's clock."""

    def __init__(self, model: str, pool: Pool) -> None:
        self.pool = pool
        self.place = place(model, pool)
        self.base_url, self.remote_model = self.place
        self.limit = Limit(pool.max_concurrency)
        self.in_flight = 0
        self.out_until = 0.0
        self.misconfigured = False
        self.retired = False
        self._times_out = 0
        self._failures = 0
        self._refusals = 0
        self._trial_to = 0
        """While it comes back: the slots at which it is back, 0 when it is."""

    def configure(self, pool: Pool) -> None:
        """Take new settings of the same place; the calls that run stay counted."""
        if pool.api_key != self.pool.api_key:
            self.out_until, self.misconfigured = 0.0, False
        self.pool = pool
        self.retired = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.pool.api_key is None else {"Authorization": f"Bearer {self.pool.api_key}"}

    def free(self, now: float) -> int:
        """Calls that may be started at once."""
        if self.retired or now < self.out_until:
            return 0
        return max(0, self.limit.value - self.in_flight)

    def report(
        self,
        server: Server,
        *,
        sent_at: float,
        now: float,
        alone: bool,
        retry_after_s: float | None = None,
    ) -> None:
        """Account for the outcome of a call. `alone`: the model has no other endpoint in service."""
        match server:
            case Server.GOOD:
                self._failures = 0
                self._refusals = 0
                self._times_out = 0
                self.misconfigured = False
                if self._trial_to:
                    self.limit.double(self._trial_to)
                    if self.limit.value >= min(self._trial_to, self.limit.maximum):
                        self._trial_to = 0
                else:
                    self.limit.good(self.in_flight)
            case Server.OVERLOADED:
                self.limit.overloaded(sent_at, now)
            case Server.REFUSING:
                self._refusals += self.limit.overloaded(sent_at, now)
                if self._refusals >= REFUSALS_TO_PAUSE:
                    self._trial_to = self._trial_to or self.limit.value
                    self.put_out(now, min(LONGEST_PAUSE_S, retry_after_s or 0.0))
            case Server.FAILING:
                self._failures += 1
                if self._failures >= FAILURES_TO_EJECT and not alone:
                    self.put_out(now)
            case Server.OUT:
                self.put_out(now)
            case Server.MISCONFIGURED:
                self.misconfigured = True
                self.put_out(now)

    def put_out(self, now: float, least_s: float = 0.0) -> None:
        """Out of service, each time in a row for twice as long; it comes back with one call."""
        if now < self.out_until:
            self.out_until = max(self.out_until, now + least_s)
            return
        self.out_until = now + max(least_s, min(LONGEST_OUT_S, FIRST_OUT_S * 2.0**self._times_out))
        self._times_out += 1
        self._failures = 0
        self._trial_to = self._trial_to or self.limit.maximum
        self.limit.restart(1)

    def try_again(self, now: float) -> None:
        """What it was out for is over."""
        self.out_until = min(self.out_until, now)
