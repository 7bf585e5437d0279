"""Which processes make up an embedded stack, and in which order they start and stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.embedded.resolve import Ports, Resolved

STOP_ORDER = (
    ("api", "control"),
    ("dispatch",),
    ("settle",),
    ("sink",),
    ("meter",),
    ("simulator", "warehouse"),
    ("kafka",),
)
"""Whoever brings work stops first, whoever keeps it last; roles of one step stop together."""

LISTED = frozenset({"api", "dispatch", "settle", "sink", "meter", "control", "warehouse", "kafka"})
"""Roles whose process ids are published; the simulator stands for servers outside the stack."""


class Role(NamedTuple):
    """One process of the stack. `kind` is its name without a number."""

    name: str
    kind: str
    command: tuple[str, ...]
    port: int | None = None
    """Set for a program that is not ours: it is ready when this port takes connections."""
    explain: Callable[[str], str] | None = None
    """For such a program: one sentence about its end, from the end of its log."""
    reads_settings: bool = False
    rereads: bool = False
    """Whether SIGHUP makes it read its settings again; the others are renewed for that."""


def openrelay(*arguments: str) -> tuple[str, ...]:
    """A command line of our own.

    `-P` keeps the working directory off the import path: a folder there may be called `services`, too.
    """
    return (sys.executable, "-P", "-m", "services.cli.openrelay", *arguments)


def foundations(resolved: Resolved, ports: Ports, directory: Path) -> list[Role]:
    """What has no need of the others and is started first; the broker's command comes from elsewhere."""
    roles = []
    if resolved.warehouse:
        command = openrelay(
            "warehouse", "--data", str(directory / "warehouse"), "--port", str(ports.warehouse)
        )
        roles.append(Role("warehouse", "warehouse", command))
    if resolved.simulated:
        models = [part for name in resolved.simulated for part in ("--models", name)]
        command = openrelay("simulate", "--port", str(ports.simulator), *models)
        roles.append(Role("simulator", "simulator", command))
    return roles


def stages(ports: Ports, config: Path, dispatchers: int) -> list[Role]:
    """The roles that need broker, topics and tables."""
    settings = ("--config", str(config))

    def role(kind: str, *more: str, slot: int = 0) -> Role:
        name = kind if slot == 0 else f"{kind}-{slot + 1}"
        command = openrelay(kind, *settings, *more)
        return Role(name, kind, command, reads_settings=True, rereads=kind == "dispatch")

    def member(kind: str, slot: int = 0) -> Role:
        return role(kind, "--slot", str(slot), slot=slot)

    return [
        role("api", "--port", str(ports.api)),
        role("control", "--port", str(ports.control)),
        *(member("dispatch", slot) for slot in range(dispatchers)),
        member("settle"),
        member("sink"),
        member("meter"),
    ]
