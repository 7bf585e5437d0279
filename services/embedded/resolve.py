"""What a person leaves out of the settings of an embedded stack, filled in.

Left out, `kafka`, `clickhouse` and `storage` mean the ones that come with it, `secrets` and `organizations`
mean ones made at the first start and kept, and a model without pools, or no models at all, means the
simulator. The result is complete: no role can tell how it came about.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from schemas.settings import Settings
from services.embedded.ports import free_port, is_free
from services.settings import SECRET_BYTES, SettingsError, Tree, checked

DEFAULT_ORGANIZATION = "org_default"
DEFAULT_MODELS: dict[str, dict[str, int]] = {
    "openrelay/gpt-oss-120b": {
        "input_nano_usd_per_mtok": 150_000_000,
        "cached_input_nano_usd_per_mtok": 75_000_000,
        "output_nano_usd_per_mtok": 600_000_000,
    },
    "openrelay/gemma-4-31b": {
        "input_nano_usd_per_mtok": 120_000_000,
        "cached_input_nano_usd_per_mtok": 60_000_000,
        "output_nano_usd_per_mtok": 350_000_000,
    },
}
SIMULATOR_CONCURRENCY = 256


class Ports(NamedTuple):
    """Where the parts of a stack listen on 127.0.0.1."""

    api: int
    control: int
    kafka: int
    kafka_controller: int
    warehouse: int
    simulator: int


class Made(NamedTuple):
    """Made at the first start and kept in the data directory, readable by its owner alone."""

    seal_key: str
    api_key: str


PLACEHOLDERS = Made(base64.b64encode(bytes(SECRET_BYTES)).decode(), "or_placeholder_key")
"""For checking settings without making anything."""


class Resolved(NamedTuple):
    """Complete settings, and which parts the stack has to bring itself."""

    settings: Settings
    kafka: bool
    warehouse: bool
    simulated: tuple[str, ...]
    """Models that run on the simulator; none: no simulator."""


def resolve(tree: Tree, directory: Path, ports: Ports, made: Made) -> Resolved:
    """The settings of an embedded stack in `directory`; raises SettingsError with every fault."""
    tree = dict(tree) | {"data_dir": str(directory)}
    own_kafka = _lacks(tree, "kafka", "bootstrap")
    if own_kafka:
        tree["kafka"] = tree.get("kafka", {}) | {"bootstrap": f"127.0.0.1:{ports.kafka}"}
    own_warehouse = _lacks(tree, "clickhouse", "url")
    if own_warehouse:
        tree["clickhouse"] = tree.get("clickhouse", {}) | {"url": f"http://127.0.0.1:{ports.warehouse}"}
    if _lacks(tree, "storage", "url"):
        tree["storage"] = tree.get("storage", {}) | {"url": (directory / "blobs").as_uri()}
    if not tree.get("secrets"):
        tree["secrets"] = {"keys": [made.seal_key]}
    if not tree.get("organizations"):
        tree["organizations"] = [
            {
                "id": DEFAULT_ORGANIZATION,
                "features": ["batch", "workflows"],
                "api_keys": [made.api_key],
            }
        ]
    simulated = _simulate(tree, f"http://127.0.0.1:{ports.simulator}/v1")
    return Resolved(checked(tree), own_kafka, own_warehouse, simulated)


def _lacks(tree: Tree, table: str, key: str) -> bool:
    """Whether the deciding key of a table is left out; a table of another type is left to the checks."""
    value = tree.get(table, {})
    return isinstance(value, dict) and key not in value


def _simulate(tree: Tree, url: str) -> tuple[str, ...]:
    models = tree.get("models") or DEFAULT_MODELS
    if not isinstance(models, dict):
        return ()
    pools = [{"base_url": url, "max_concurrency": SIMULATOR_CONCURRENCY}]
    simulated = tuple(
        name for name, model in models.items() if isinstance(model, dict) and not model.get("pools")
    )
    tree["models"] = {
        name: model | {"pools": pools} if name in simulated else model for name, model in models.items()
    }
    return simulated


def choose_ports(directory: Path, api: int, control: int) -> Ports:
    """Ports for this run: the ones of the last run where they are still free, else others.

    `api` and `control` are the caller's wish, 0 for any. Written down in `run/ports.json`.
    """
    file = directory / "run" / "ports.json"
    try:
        last = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        last = {}
    taken: set[int] = {api, control}

    def port(name: str) -> int:
        known = last.get(name)
        while not isinstance(known, int) or known in taken or not is_free(known):
            known = free_port()
        taken.add(known)
        return known

    inner = {name: port(name) for name in ("kafka", "kafka_controller", "warehouse", "simulator")}
    ports = Ports(api=api or port("api"), control=control or port("control"), **inner)
    _write(file, ports._asdict())
    return ports


def made(directory: Path) -> Made:
    """The key and secret of this data directory, made when there are none."""
    file = directory / "secrets.json"
    try:
        return Made(**json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        fresh = Made(
            seal_key=base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode(),
            api_key="or_" + secrets.token_urlsafe(24),
        )
        _write(file, fresh._asdict())
        return fresh
    except (ValueError, TypeError) as error:
        raise SettingsError(
            [f"{file}: damaged ({error}); restore it, since sealed records need it"]
        ) from error


def _write(file: Path, value: object) -> None:
    """JSON for the owner's eyes, in place in one step and on disk before it is used."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(value, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
