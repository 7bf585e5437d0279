"""What can wait until a burst of answers is over.

Calls of one length that began together end together. An answer frees its slot at once, but while answers are
read one after the other the slots of those behind them stand empty, and the broker is busy with results when
the calls that fill them should leave. So the answers of a burst are all taken first, then read.
"""

from __future__ import annotations

import asyncio
from collections import deque

QUIET_TURNS = 2
"""Turns of the loop without an answer: new calls begin in the first and leave in the second."""

MOST_S = 0.05
"""What is not in the log when the process dies is called again, so nothing waits longer."""

AT_ONCE = 32
"""Released in one turn of the loop, between which further answers are taken."""


class Lull:
    """For one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._came = False
        self._quiet = 0
        self._until = 0.0
        self._looking = False

    async def wait(self) -> None:
        """An answer has come: return when no other comes right behind it, or after `MOST_S`."""
        self._came = True
        if not self._looking:
            self._looking = True
            self._until = self._loop.time() + MOST_S
            self._loop.call_soon(self._look)
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _look(self) -> None:
        self._quiet = 0 if self._came else self._quiet + 1
        self._came = False
        if self._quiet >= QUIET_TURNS or self._loop.time() >= self._until:
            for _ in range(min(AT_ONCE, len(self._waiting))):
                turn = self._waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
        self._looking = bool(self._waiting)
        if self._looking:
            self._loop.call_soon(self._look)
