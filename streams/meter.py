"""Meter: carries usage and the state of batches from Kafka into ClickHouse, through faust.

Two agents, each strictly sequential: take a list of events, insert its rows, and only when ClickHouse has
acknowledged them let faust commit. What happens if the process dies:

1. rows of contiguous events of one partition are inserted; a failed insert is repeated with the same rows
      dies: the events come again; equal rows collapse under FINAL, because every key column follows from the
      identity of the usage, not from a clock
2. the offset is committed

An agent that fails must take the process with it (`CrashingSupervisor`): faust would acknowledge the events
otherwise. So must one that is blocked for long, since faust never recovers from that: after `GIVE_UP_S` of a
failing warehouse the process ends and is started again. And so must one that was given no partitions because
faust asked a broker that had only just come back: it would wait for ever, so a watch over the group's offsets
ends a process that does nothing while nothing is done. No table, no concurrency, no background tasks: each of
them loses events on a crash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import faust
import msgspec
import structlog
from mode.supervisors import CrashingSupervisor

from schemas import topics
from schemas.facts import BatchFact, Created, Ended
from schemas.records import UsageChunk, UsageRow
from schemas.settings import Settings
from streams import metrics
from streams.core.pricing import billing_month
from streams.crashpoints import passing
from streams.kafka.admin import Admin, TopicPartition
from streams.kafka.messages import KafkaFailed

GROUP = "meter"
TAKE = 100
TAKE_WITHIN_S = 0.2
RETRY_S = 0.5
GIVE_UP_S = 300.0
WATCH_EVERY_S = 5.0
IDLE_S = 20.0
"""Usage waits, its offset does not move, and this process has had nothing to do: something is wrong here."""

Insert = Callable[[str, list[str], list[list[Any]]], None]
"""Table, column names, rows. Blocks until acknowledged; raises what the client raises."""

log = structlog.get_logger("openrelay.meter")

_decode_chunk = msgspec.json.Decoder(UsageChunk).decode
_decode_fact = msgspec.json.Decoder(BatchFact).decode

USAGE_COLUMNS = [
    "org_id", "billing_month", "batch_id", "request_index", "entry_id", "kind", "model", "endpoint", "tier",
    "api_key_id", "completed_at", "input_tokens", "cached_tokens", "output_tokens", "price_id",
    "cost_input_nano", "cost_output_nano", "cost_nano_usd", "output_offset", "usage_topic",
    "usage_partition", "usage_offset",
]  # fmt: skip
REJECT_COLUMNS = [
    "org_id", "batch_id", "request_index", "entry_id", "model", "usage_topic", "usage_partition",
    "usage_offset", "reason", "detail", "raw",
]  # fmt: skip
BATCH_COLUMNS = [
    "org_id", "billing_month", "batch_id", "status", "is_terminal", "created_at", "ended_at", "model",
    "endpoint", "tier", "api_key_id", "total", "completed", "failed", "billed_records", "input_tokens",
    "cached_tokens", "output_tokens", "cost_nano_usd", "seq",
]  # fmt: skip


def build(
    settings: Settings, instance: str, open_insert: Callable[[], Insert], ready: Callable[[], None]
) -> faust.App:
    """The faust app. `open_insert` is called in a thread and may block until the warehouse is there."""
    directory = Path(settings.data_dir) / "meter" / instance
    directory.mkdir(parents=True, exist_ok=True)
    app = faust.App(
        GROUP,
        broker=[f"aiokafka://{server}" for server in settings.kafka.bootstrap.split(",")],
        broker_client_id=f"openrelay-{instance}",
        broker_session_timeout=6.0,
        broker_heartbeat_interval=1.0,
        broker_commit_interval=1.0,
        consumer_auto_offset_reset="earliest",
        processing_guarantee="at_least_once",
        agent_supervisor=CrashingSupervisor,
        topic_disable_leader=True,
        topic_allow_declare=False,
        store="memory://",
        datadir=str(directory),
        web_enabled=False,
        autodiscover=False,
    )
    warehouse = _Warehouse(open_insert)

    def topic(name: str) -> Any:
        return app.topic(name, value_serializer="raw", key_serializer="raw", internal=False)

    @app.agent(topic(topics.USAGE), name="usage")  # type: ignore[untyped-decorator]
    async def usage(stream: Any) -> None:
        async for events in stream.take_events(TAKE, within=TAKE_WITHIN_S):
            for run in _by_partition(events):
                rows, rejects = usage_rows(run)
                await warehouse.insert("billing.usage_rejects", REJECT_COLUMNS, rejects)
                await warehouse.insert("billing.usage_events", USAGE_COLUMNS, rows)

    @app.agent(topic(topics.BATCHES), name="batches")  # type: ignore[untyped-decorator]
    async def batches(stream: Any) -> None:
        async for events in stream.take_events(TAKE, within=TAKE_WITHIN_S):
            for run in _by_partition(events):
                await warehouse.insert("billing.batches", BATCH_COLUMNS, batch_rows(run))

    @app.task  # type: ignore[untyped-decorator]
    async def started() -> None:
        ready()
        watch = _Watch(Admin(settings.kafka, f"openrelay-{instance}-watch"))
        while not app.should_stop:
            await app.sleep(WATCH_EVERY_S)
            if await asyncio.to_thread(watch.stuck, time.monotonic()) and warehouse.idle_s() > IDLE_S:
                await app.crash(RuntimeError("usage waits and none is given to this process"))

    return app


class _Watch:
    """Whether the group's offsets stand still although there is something to read. Blocks."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._seen: dict[TopicPartition, int] = {}
        self._since = 0.0

    def stuck(self, now: float) -> bool:
        try:
            counts = self._admin.partitions([topics.USAGE, topics.BATCHES])
            partitions = [(topic, p) for topic, count in counts.items() for p in range(count)]
            committed = self._admin.committed(GROUP, partitions)
            ends = self._admin.end_offsets(partitions)
        except KafkaFailed as error:
            log.warning("offsets cannot be asked", error=str(error))
            return False
        waiting = any(end > committed.get(partition, 0) for partition, end in ends.items())
        if committed != self._seen or not waiting:
            self._seen, self._since = committed, now
        return now - self._since > IDLE_S


class _Warehouse:
    """Inserts, repeated until acknowledged or until it is time to give up."""

    def __init__(self, open_insert: Callable[[], Insert]) -> None:
        self._open = open_insert
        self._insert: Insert | None = None
        self._busy_at = time.monotonic()

    def idle_s(self) -> float:
        """Time since there was something to insert."""
        return time.monotonic() - self._busy_at

    async def insert(self, table: str, columns: list[str], rows: list[list[Any]]) -> None:
        if not rows:
            return
        began = time.monotonic()
        deadline = began + GIVE_UP_S
        while True:
            self._busy_at = time.monotonic()
            try:
                await asyncio.to_thread(self._once, table, columns, rows)
                metrics.METER_ROWS.labels(table).inc(len(rows))
                metrics.METER_SECONDS.labels(table).observe(time.monotonic() - began)
                passing("meter.inserted")
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    raise
                metrics.METER_FAILURES.labels(table).inc()
                log.warning("insert failed, will be repeated", table=table, error=str(error)[:300])
                self._insert = None
                await asyncio.sleep(RETRY_S)

    def _once(self, table: str, columns: list[str], rows: list[list[Any]]) -> None:
        if self._insert is None:
            self._insert = self._open()
        self._insert(table, columns, rows)


def _by_partition(events: Sequence[Any]) -> list[list[Any]]:
    runs: dict[int, list[Any]] = {}
    for event in events:
        runs.setdefault(event.message.partition, []).append(event)
    return list(runs.values())


def usage_rows(events: Sequence[Any]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Rows of `usage_events`, and of `usage_rejects` for what cannot be billed."""
    rows: list[list[Any]] = []
    rejects: list[list[Any]] = []
    for event in events:
        message = event.message
        place = [message.topic, message.partition, message.offset]
        try:
            chunk = _decode_chunk(message.value)
        except msgspec.DecodeError as error:
            raw = bytes(message.value or b"").decode("utf-8", errors="replace")
            rejects.append(["", "", 0, "", "", *place, "unreadable", str(error), raw])
            continue
        for row in chunk.rows:
            if row.unmetered:
                identity = [chunk.organization, chunk.batch, row.request_index, row.entry_id, chunk.model]
                rejects.append([*identity, *place, "unmetered", row.unmetered, ""])
            else:
                rows.append(_usage_row(chunk, row, place))
    return rows, rejects


def _usage_row(chunk: UsageChunk, row: UsageRow, place: list[Any]) -> list[Any]:
    return [
        chunk.organization,
        chunk.billing_month,
        chunk.batch,
        row.request_index,
        row.entry_id,
        "usage",
        chunk.model,
        chunk.endpoint,
        chunk.tier,
        chunk.api_key_id,
        _time(row.completed_at_ms),
        row.input_tokens,
        row.cached_tokens,
        row.output_tokens,
        chunk.price_id,
        row.cost_input_nano,
        row.cost_output_nano,
        row.cost_input_nano + row.cost_output_nano,
        row.output_offset,
        *place,
    ]


def batch_rows(events: Sequence[Any]) -> list[list[Any]]:
    """Rows of `billing.batches`: one when a batch is created, one that replaces it when it has ended."""
    rows = []
    for event in events:
        if event.message.value is None:
            continue
        fact = _decode_fact(event.message.value)
        if isinstance(fact, Created):
            rows.append(_batch_row(fact, event.message.timestamp, None, None))
        elif isinstance(fact, Ended):
            rows.append(_batch_row(fact.created, fact.created_at_ms, fact, event.message.timestamp))
    return rows


def _batch_row(created: Created, created_at: float, ended: Ended | None, ended_at: float | None) -> list[Any]:
    created_at_ms = round(created_at if ended else created_at * 1000)
    settled = ended.settled if ended else None
    usage = settled.usage if settled else None
    return [
        created.organization,
        billing_month(created_at_ms),
        created.batch,
        ended.status if ended else "validating",
        ended is not None,
        _time(created_at_ms),
        None if ended_at is None else _time(round(ended_at * 1000)),
        created.model or "",
        created.endpoint,
        created.priority.value,
        created.api_key_id,
        created.total,
        settled.completed if settled else 0,
        settled.failed if settled else created.rejected,
        usage.billed_records if usage else 0,
        usage.input if usage else 0,
        usage.cached if usage else 0,
        usage.output if usage else 0,
        usage.cost_nano_usd if usage else 0,
        2 if ended else 1,
    ]


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC)
