"""`connection.json`: where a running stack is, for programs that use it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from schemas.settings import Settings
from services.embedded.resolve import Ports


class Connection(NamedTuple):
    base_url: str
    control_url: str
    api_key: str | None
    kafka_bootstrap: str
    clickhouse_url: str


def connection(settings: Settings, ports: Ports) -> Connection:
    keys = [key for organization in settings.organizations[:1] for key in organization.api_keys[:1]]
    return Connection(
        base_url=f"http://127.0.0.1:{ports.api}/v1",
        control_url=f"http://127.0.0.1:{ports.control}",
        api_key=keys[0] if keys else None,
        kafka_bootstrap=settings.kafka.bootstrap,
        clickhouse_url=settings.clickhouse.url,
    )


def publish(file: Path, where: Connection, pids: dict[str, int]) -> None:
    """Replace the file in one step; it holds a key, so only its owner may read it."""
    temporary = file.with_suffix(".json.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(where._asdict() | {"pids": pids}, out, indent=2)
        out.write("\n")
    os.replace(temporary, file)
