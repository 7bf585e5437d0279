"""Named points at which a process can be told to die, for tests of what is true when it does.

Each numbered step in a stage's docstring has one. A point that is not armed costs a dictionary look-up; only
`services` reads the environment and arms.

    OPENRELAY_CRASH_AT=settle.effects:2          at the second passage
    OPENRELAY_CRASH_AT=dispatch.called@poison    whenever the detail contains `poison`
"""

from __future__ import annotations

import os
import signal

_passages: dict[str, int] = {}
_details: dict[str, str] = {}


def arm(specification: str) -> None:
    """Arm one point; raises ValueError for a specification that is neither `point:n` nor `point@text`."""
    point, mark, text = specification.partition("@")
    if mark:
        _details[point] = text
        return
    point, _, count = specification.partition(":")
    _passages[point] = int(count)


def passing(point: str, detail: str = "") -> None:
    """Die here, as by SIGKILL, if this passage is the one."""
    if point in _details and _details[point] in detail:
        os.kill(os.getpid(), signal.SIGKILL)
    left = _passages.get(point)
    if left is not None:
        _passages[point] = left - 1
        if left == 1:
            os.kill(os.getpid(), signal.SIGKILL)
