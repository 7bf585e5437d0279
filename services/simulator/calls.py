"""The record of calls: a line of JSON for each, and how often each prompt came.

Lines are gathered and written together, at most `FLUSH_S` after the call ended, so that the log costs
microseconds a call; what a SIGKILL finds in the buffer is lost.
"""

from __future__ import annotations

from collections import Counter
from typing import BinaryIO

import msgspec

FLUSH_S = 0.05
MAX_PROMPTS = 200_000
"""Distinct prompts whose calls are counted; a load test has more than anybody asks about."""


class CallLine(msgspec.Struct, frozen=True):
    """One call in the log. Times are Unix seconds; `t_start` is when it got a slot (null: it never did)."""

    number: int
    t_arrived: float
    t_start: float | None
    t_end: float
    status: int | None
    """HTTP status sent; null when the client went away, or was sent away, before one was."""
    model: str
    marker: str
    prompt: str
    """Digest of the last user message and the round of the tool loop."""
    round: int
    concurrency: int
    """Calls that had a slot when this one got its own, itself included."""
    peer: str
    body: msgspec.Raw | None = None
    """The request as it came, if the server was told to keep it."""


class Calls:
    """Counts of one server and, with a `log`, its file."""

    def __init__(self, log: BinaryIO | None) -> None:
        self._log = log
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self.number = 0
        self.count = 0
        self.by_marker: Counter[str] = Counter()
        self.truncated = False
        """Whether some prompts are missing from `by_marker`."""

    @property
    def logged(self) -> bool:
        return self._log is not None

    def arrived(self, marker: str) -> int:
        """Number of this call, from 1."""
        self.number += 1
        self.count += 1
        if marker in self.by_marker or len(self.by_marker) < MAX_PROMPTS:
            self.by_marker[marker] += 1
        else:
            self.truncated = True
        return self.number

    def ended(self, line: CallLine) -> bool:
        """Take a line for the log; True if it is the first one since the last `flush`."""
        self._lines.append(self._encode(line))
        return len(self._lines) == 1

    def flush(self) -> None:
        if self._log is not None and self._lines:
            self._log.write(b"\n".join(self._lines) + b"\n")
            self._log.flush()
        self._lines.clear()

    def reset(self) -> None:
        """Forget the counts; the numbers go on, because ids of answers come from them."""
        self.count = 0
        self.by_marker.clear()
        self.truncated = False
