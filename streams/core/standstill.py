"""When everybody else stands still for records that must run alone, and for how long.

Two sides take turns. In their turn the suspects run one after the other, and nothing else starts; then the
others have at least as long, so they always have half of the time. While nobody else waits, the suspects need
not wait either.
"""

from __future__ import annotations

import math

TURN_S = 1.0
"""No further suspect begins after so long a turn, and no turn of the others is shorter while they wait."""

PATIENCE_S = 10.0
"""The others wait so long for the calls that run to end, and so long again for the one that runs alone."""

CAREFUL_AFTER = 2
"""Crashes in a row after which suspects must run alone."""

LATER_PATIENCE_S = 60.0
"""After another crash: what kills us later than we have been patient should still be found."""


def patience_s(crashes: int, limit_s: float) -> float:
    """After so many crashes in a row; longer than `limit_s` no call lasts."""
    return min(limit_s, PATIENCE_S if crashes <= CAREFUL_AFTER else LATER_PATIENCE_S)


class Standstill:
    """`now` is seconds of any one clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._others_until = -math.inf

    def __bool__(self) -> bool:
        """Whether it is the suspects' turn: nothing else starts."""
        return self._since is not None

    def due(self, now: float, *, others_wait: bool) -> bool:
        """Whether a turn of the suspects may begin."""
        return self._since is None and (not others_wait or now >= self._others_until)

    def begin(self, now: float) -> None:
        self._since = now

    def over(self, now: float) -> bool:
        """Whether no further suspect begins in this turn."""
        return self._since is None or now - self._since >= TURN_S

    def end(self, now: float) -> None:
        """The others may start again, for at least as long as they stood still."""
        assert self._since is not None, "it was begun"
        self._others_until = now + max(TURN_S, now - self._since)
        self._since = None
