"""Numbered DDL, applied in order and once.

Files `schemas/clickhouse/NNNN_name.sql` are never edited after they were applied: what was applied is kept
with its hash, and a file that differs stops everything. Every statement can be repeated, so a migration cut
short by a crash is simply run again from its start.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any, NamedTuple

_PREPARE = (
    "CREATE DATABASE IF NOT EXISTS billing ENGINE = Atomic",
    "CREATE TABLE IF NOT EXISTS billing.schema_migrations "
    "(version UInt32, name String, sha256 String, applied_at DateTime64(3, 'UTC') DEFAULT now64(3)) "
    "ENGINE = ReplacingMergeTree ORDER BY version",
)


class MigrationError(Exception):
    """The database and the files disagree; nothing more was applied."""


class Migration(NamedTuple):
    version: int
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def statements(self) -> list[str]:
        """The statements, split at semicolons that end a line."""
        lines = [line for line in self.text.splitlines() if not line.lstrip().startswith("--")]
        parts = ("\n".join(lines) + "\n").split(";\n")
        return [part.strip() for part in parts if part.strip()]


def migrations() -> list[Migration]:
    """All of them in order."""
    found = []
    for file in resources.files("schemas").joinpath("clickhouse").iterdir():
        if file.name.endswith(".sql"):
            version, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(version), name, file.read_text("utf-8")))
    return sorted(found)


def migrate(client: Any) -> list[str]:
    """Bring the database up to date through a clickhouse-connect client; returns what was applied now.

    Raises MigrationError, or the client's errors.
    """
    for statement in _PREPARE:
        client.command(statement)
    rows = client.query("SELECT version, sha256 FROM billing.schema_migrations FINAL").result_rows
    applied = {int(version): str(sha256) for version, sha256 in rows}
    done = []
    for migration in migrations():
        known = applied.pop(migration.version, None)
        if known is None:
            _apply(client, migration)
            done.append(f"{migration.version:04d}_{migration.name}")
        elif known != migration.sha256:
            raise MigrationError(
                f"migration {migration.version:04d}_{migration.name} differs from the one applied"
            )
    if applied:
        newest = max(applied)
        raise MigrationError(f"the database has migration {newest:04d}, which this release does not know")
    return done


def _apply(client: Any, migration: Migration) -> None:
    for statement in migration.statements:
        client.command(statement)
    client.insert(
        "billing.schema_migrations",
        [[migration.version, migration.name, migration.sha256]],
        column_names=["version", "name", "sha256"],
        settings={"async_insert": 0},
    )
