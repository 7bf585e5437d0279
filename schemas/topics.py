"""The topic catalogue: who writes, who reads, by what key, how long it is kept.

`services` creates every topic from here with explicit settings; `streams/README.md` shows the same table.
"""

from __future__ import annotations

import hashlib
import re
import zlib

import msgspec

HOUR_MS = 3_600_000
MAX_MESSAGE_BYTES = 2 * 1024 * 1024
"""Well over the largest body that travels inline; larger bodies go by reference."""

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "60000",
    "delete.retention.ms": str(7 * 24 * HOUR_MS),
}


def _kept(hours: int) -> dict[str, str]:
    return {"cleanup.policy": "delete", "retention.ms": str(hours * HOUR_MS), "retention.bytes": "-1"}


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """One topic. `partitions` is `facts`, `requests` or `results`: which setting counts them."""

    name: str
    owner: str
    readers: tuple[str, ...]
    key: str
    holds: str
    partitions: str
    config: dict[str, str]


BATCHES = "batches"
FILES = "files"
KEYS = "keys"
CLAIMS = "claims"
PROGRESS = "progress"
RESULTS = "results"
OUTPUTS = "outputs"
ERRORS = "errors"
USAGE = "usage"
LEDGER = "ledger"
DONE = "done"
REQUESTS_PREFIX = "requests."

CATALOGUE: tuple[Topic, ...] = (
    Topic(
        name=BATCHES,
        owner="api, intake, settle, sink",
        readers=("api", "dispatch", "settle", "sink", "meter"),
        key="<batch id>:<fact>:<attempt>",
        holds="write-once facts of every batch",
        partitions="results",
        config=COMPACTED | {"flush.messages": "1"},
    ),
    Topic(
        name=FILES,
        owner="api",
        readers=("api",),
        key="<file id>:<fact>",
        holds="files put, stored, used as input and deleted",
        partitions="facts",
        config=COMPACTED,
    ),
    Topic(
        name=KEYS,
        owner="openrelay keys, api",
        readers=("api", "control"),
        key="<key id>:<fact>",
        holds="API keys issued and revoked, and when they were used",
        partitions="facts",
        config=COMPACTED,
    ),
    Topic(
        name=CLAIMS,
        owner="api",
        readers=("api",),
        key="<scope>",
        holds="who creates which batch",
        partitions="results",
        config=_kept(25) | {"flush.messages": "1"},
    ),
    Topic(
        name=PROGRESS,
        owner="settle",
        readers=("api",),
        key="<batch id>",
        holds="counts of running batches",
        partitions="results",
        config=COMPACTED,
    ),
    Topic(
        name=RESULTS,
        owner="dispatch, settle",
        readers=("settle",),
        key="<batch id>",
        holds="everything that happened to a record, in order",
        partitions="results",
        config=_kept(72),
    ),
    Topic(
        name=OUTPUTS,
        owner="settle",
        readers=("sink", "meter"),
        key="<batch id>",
        holds="accepted output lines",
        partitions="results",
        config=_kept(72),
    ),
    Topic(
        name=ERRORS,
        owner="settle",
        readers=("sink", "meter"),
        key="<batch id>",
        holds="accepted error lines",
        partitions="results",
        config=_kept(72),
    ),
    Topic(
        name=USAGE,
        owner="settle",
        readers=("meter",),
        key="<batch id>",
        holds="usage of accepted results",
        partitions="results",
        config=_kept(14 * 24),
    ),
    Topic(
        name=LEDGER,
        owner="settle",
        readers=("settle",),
        key="<batch id>",
        holds="the arbiter's state",
        partitions="results",
        config=COMPACTED,
    ),
    Topic(
        name=DONE,
        owner="dispatch",
        readers=("dispatch",),
        key="<topic>:<partition>:<batch id>:<attempt>",
        holds="positions finished by the dispatcher",
        partitions="results",
        config=COMPACTED,
    ),
)


def requests_topic(model: str) -> Topic:
    """The backlog of one model."""
    return Topic(
        name=requests_name(model),
        owner="intake",
        readers=("dispatch",),
        key="<batch id>",
        holds=f"accepted records for {model}",
        partitions="requests",
        config=_kept(72),
    )


def requests_name(model: str) -> str:
    """`requests.<slug>-<hash>`: readable, legal, and distinct for models whose slugs are equal."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:80]
    return f"{REQUESTS_PREFIX}{slug}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key, the same in every process and release (CRC-32 modulo the count)."""
    return zlib.crc32(key.encode()) % partitions
