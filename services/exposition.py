"""How a process shows its metrics.

Every role listens on a port of its own (`metrics.host`, `metrics.port`; by default any port of 127.0.0.1) and
writes its address into `<data directory>/run/metrics/<role>.json`, where the control host finds it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from prometheus_client import ProcessCollector, start_http_server

from schemas.settings import Settings
from services.process import PortTaken
from streams import metrics

OWNERS = frozenset(entry.owner for entry in metrics.CATALOGUE) - {"control"}
"""Roles with metrics of their own; the control host shows its own with those of all others."""


class Address(msgspec.Struct, frozen=True):
    """Where a role shows its metrics."""

    role: str
    pid: int
    url: str


def directory(settings: Settings) -> Path:
    return Path(settings.data_dir) / "run" / "metrics"


def serve(settings: Settings, role: str) -> None:
    """Show this process's metrics from a thread, for as long as it lives. `role` may carry a number.

    Raises PortTaken.
    """
    host = settings.metrics.host
    owner = role.partition("-")[0]
    if owner not in OWNERS:
        return
    registry = metrics.registry(owner)
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(settings.metrics.port, host, registry)
    except OSError as error:
        raise PortTaken(f"metrics: port {settings.metrics.port} of {host}: {error.strerror}") from error
    place = directory(settings)
    place.mkdir(parents=True, exist_ok=True)
    address = Address(role, os.getpid(), f"http://{_reachable(host)}:{server.server_port}/metrics")
    partial = place / f"{role}.{os.getpid()}.new"
    partial.write_bytes(msgspec.json.encode(address))
    partial.replace(place / f"{role}.json")


def addresses(settings: Settings) -> list[Address]:
    """Of every role that was started, by name; some may be gone."""
    files = sorted(directory(settings).glob("*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Address) for file in files]


def forget_dead(settings: Settings) -> None:
    """Remove the addresses of processes that are no more, for instance of an earlier run."""
    for file in directory(settings).glob("*.json"):
        try:
            os.kill(msgspec.json.decode(file.read_bytes(), type=Address).pid, 0)
        except PermissionError:
            continue  # it lives, as another user's
        except (ProcessLookupError, msgspec.DecodeError):
            file.unlink(missing_ok=True)


def _reachable(host: str) -> str:
    """An address that listens everywhere is asked on this machine."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
