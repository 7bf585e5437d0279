"""Named points at which a process can be told to die or to stand still, for tests of what is true then.

Each numbered step in a stage's docstring has one. A point that is not armed costs a dictionary look-up; only
`services` reads the environment and arms.

    OPENRELAY_CRASH_AT=settle.effects:2          at the second passage
    OPENRELAY_CRASH_AT=dispatch.called@poison    whenever the detail contains `poison`
    OPENRELAY_CRASH_AT=api.creating~2             at the second passage, stand still until told to go on
"""

from __future__ import annotations

import os
import signal

_passages: dict[str, int] = {}
_details: dict[str, str] = {}
_stops: set[str] = set()


def arm(specification: str) -> None:
    """Arm one point; raises ValueError for what is not `point:n`, `point~n` or `point@text`."""
    point, mark, text = specification.partition("@")
    if mark:
        _details[point] = text
        return
    if "~" in specification:
        specification = specification.replace("~", ":", 1)
        _stops.add(specification.partition(":")[0])
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
            os.kill(os.getpid(), signal.SIGSTOP if point in _stops else signal.SIGKILL)
