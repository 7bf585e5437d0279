"""What finance relies on, held against the real tables: repeats collapse, sums hold, months close once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from services.warehouse import migrate as migration
from services.warehouse.migrate import MigrationError, migrate, migrations
from tests.support.warehouse import EmbeddedWarehouse

COLUMNS = [
    "org_id",
    "billing_month",
    "batch_id",
    "request_index",
    "entry_id",
    "kind",
    "model",
    "endpoint",
    "tier",
    "api_key_id",
    "completed_at",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "price_id",
    "cost_input_nano",
    "cost_output_nano",
    "cost_nano_usd",
    "output_offset",
    "usage_topic",
    "usage_partition",
    "usage_offset",
]
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def client(warehouse: EmbeddedWarehouse) -> Iterator[Any]:
    connected = warehouse.client()
    connected.command("DROP DATABASE IF EXISTS billing SYNC")
    migrate(connected)
    yield connected
    connected.close()


def _row(
    index: int,
    *,
    offset: int,
    tokens: int = 100,
    organization: str = "org_a",
    entry: str = "usage",
    month: int = 202611,
    kind: str = "usage",
    batch: str = "batch_1",
) -> list[object]:
    return [
        organization, month, batch, index, entry, kind, "m", "/v1/chat/completions", "standard", "key_1", NOW,
        tokens, 0, tokens * 2, "price_1", tokens * 3, tokens * 5, tokens * 8, offset, "usage", 0, offset,
    ]  # fmt: skip


def _insert(client: Any, rows: list[list[object]]) -> None:
    client.insert("billing.usage_events", rows, column_names=COLUMNS)


def _cost(client: Any, where: str = "1") -> int:
    return int(client.command(f"SELECT sum(toInt128(cost_nano_usd)) FROM billing.usage WHERE {where}"))


def test_migrations_apply_once(client: Any) -> None:
    assert migrate(client) == []
    assert client.command("SELECT count() FROM billing.schema_migrations FINAL") == len(migrations())


def test_a_migration_cut_short_is_run_again(client: Any) -> None:
    client.command("TRUNCATE TABLE billing.schema_migrations")
    client.command("DROP VIEW billing.unbilled")
    assert migrate(client) == ["0001_billing"]
    assert client.command("SELECT count() FROM billing.unbilled") == 0


def test_an_edited_migration_stops_everything(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = [m._replace(text=m.text + "\n") for m in migrations()]
    monkeypatch.setattr(migration, "migrations", lambda: edited)
    with pytest.raises(MigrationError, match="0001_billing"):
        migrate(client)


def test_a_database_from_a_newer_release_is_left_alone(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client.insert(
        "billing.schema_migrations", [[9999, "later", ""]], column_names=["version", "name", "sha256"]
    )
    with pytest.raises(MigrationError, match="9999"):
        migrate(client)


def test_the_first_version_wins_in_any_order_of_arrival(client: Any) -> None:
    _insert(client, [_row(0, offset=50, tokens=7)])
    _insert(client, [_row(0, offset=10, tokens=3)])
    _insert(client, [_row(0, offset=99, tokens=9)])
    assert client.query("SELECT input_tokens, output_offset FROM billing.usage").result_rows == [(3, 10)]
    client.command("OPTIMIZE TABLE billing.usage_events FINAL")
    assert client.query("SELECT input_tokens, output_offset FROM billing.usage").result_rows == [(3, 10)]


def test_retries_rewinds_and_reexecutions_change_no_sum(client: Any) -> None:
    rng = random.Random(7)
    rows = [_row(n, offset=n, tokens=rng.randrange(1, 5_000)) for n in range(10_000)]
    expected = sum(int(str(row[COLUMNS.index("cost_nano_usd")])) for row in rows)
    at = 0
    while at < len(rows):
        size = rng.randrange(1, 1_500)
        chunk = rows[at : at + size]
        _insert(client, chunk)
        if rng.random() < 0.4:
            _insert(client, chunk)
        at += size if rng.random() < 0.9 else size // 2 + 1  # now and then a rewind before the commit
    again = rng.sample(range(10_000), 300)
    _insert(client, [_row(n, offset=20_000 + n, tokens=rng.randrange(1, 5_000)) for n in again])
    assert _cost(client) == expected
    assert client.command("SELECT count() FROM billing.usage") == 10_000


def test_one_identity_with_two_sets_of_numbers_is_shown(client: Any) -> None:
    _insert(client, [_row(0, offset=1), _row(1, offset=2)])
    _insert(client, [_row(0, offset=1), _row(1, offset=2, tokens=999)])
    found = client.query("SELECT request_index, versions FROM billing.conflicting_duplicates").result_rows
    assert found == [(1, 2)]


@pytest.mark.parametrize("column", ["input_tokens", "cost_nano_usd", "cached_tokens"])
def test_a_row_that_does_not_add_up_is_refused(client: Any, column: str) -> None:
    row = _row(0, offset=1)
    row[COLUMNS.index(column)] = -1
    with pytest.raises(Exception, match="VIOLATED_CONSTRAINT"):
        _insert(client, [row])
    assert _cost(client) == 0


def _invoice(client: Any, month: int, invoice: str) -> None:
    """Close a month: what is unbilled up to it becomes lines of an invoice."""
    client.command(
        "INSERT INTO billing.invoice_lines (org_id, invoice_id, invoice_month, usage_month, line_class, "
        "model, tier, requests, input_tokens, cached_tokens, output_tokens, cost_nano_usd) "
        "SELECT org_id, {invoice:String}, {month:UInt32}, usage_month, multiIf(cls = 'credit', 'credit', "
        "usage_month < {month:UInt32}, 'prior_period', 'usage'), model, tier, requests, input_tokens, "
        "cached_tokens, output_tokens, cost_nano_usd FROM billing.unbilled "
        "WHERE usage_month <= {month:UInt32}",
        parameters={"invoice": invoice, "month": month},
    )


def test_a_month_closes_once_and_late_usage_is_on_the_next_invoice(client: Any) -> None:
    _insert(client, [_row(n, offset=n) for n in range(10)])
    _invoice(client, 202611, "inv_1")
    _invoice(client, 202611, "inv_1")
    assert client.command("SELECT sum(cost_nano_usd) FROM billing.invoice_lines FINAL") == 8_000
    assert client.command("SELECT count() FROM billing.unbilled") == 0

    _insert(client, [_row(10, offset=10)])
    credit = _row(3, offset=0, tokens=-100, entry="adj_01", kind="credit", month=202612)
    _insert(client, [credit])
    _insert(client, [credit])
    _invoice(client, 202612, "inv_2")
    lines = client.query(
        "SELECT line_class, requests, cost_nano_usd FROM billing.invoice_lines FINAL "
        "WHERE invoice_id = 'inv_2' ORDER BY line_class"
    ).result_rows
    assert lines == [("prior_period", 1, 800), ("credit", 0, -800)]
    assert client.command("SELECT count() FROM billing.unbilled") == 0
    assert client.command("SELECT sum(cost_nano_usd) FROM billing.invoice_lines FINAL") == _cost(client)


def _batch(client: Any, batch: str, *, records: int, tokens: int, ended: bool = True) -> None:
    client.insert(
        "billing.batches",
        [["org_a", 202611, batch, "completed" if ended else "in_progress", ended, NOW, NOW if ended else None,
          records, records, 0, records, tokens, 0, tokens * 2, tokens * 8, 2 if ended else 1]],
        column_names=["org_id", "billing_month", "batch_id", "status", "is_terminal", "created_at",
                      "ended_at", "total", "completed", "failed", "billed_records", "input_tokens",
                      "cached_tokens", "output_tokens", "cost_nano_usd", "seq"],
    )  # fmt: skip


def test_batches_and_their_rows_are_held_against_each_other(client: Any) -> None:
    _insert(client, [_row(n, offset=n) for n in range(3)])
    _insert(client, [_row(0, offset=10, entry=f"usage:{step}:r") for step in range(2)])  # a workflow's calls
    _batch(client, "batch_1", records=3, tokens=500)
    _batch(client, "batch_empty", records=0, tokens=0)
    _insert(client, [_row(0, offset=20, batch="batch_running")])
    _batch(client, "batch_running", records=0, tokens=0, ended=False)
    assert client.query("SELECT * FROM billing.batch_mismatches").result_rows == []

    _batch(client, "batch_lost", records=1, tokens=100)
    _insert(client, [_row(0, offset=30, batch="batch_unknown")])
    found = client.query(
        "SELECT batch_id, batch_records, ledger_records FROM billing.batch_mismatches ORDER BY 1"
    )
    assert found.result_rows == [("batch_lost", 1, 0), ("batch_unknown", 0, 1)]


def test_rejects_of_one_message_stay_apart_and_repeats_of_one_row_collapse(client: Any) -> None:
    columns = [
        "batch_id",
        "request_index",
        "entry_id",
        "usage_topic",
        "usage_partition",
        "usage_offset",
        "reason",
    ]
    rows: list[list[object]] = [
        ["b", 0, "usage", "usage", 0, 5, "missing"],
        ["b", 1, "usage", "usage", 0, 5, "float"],
    ]
    client.insert("billing.usage_rejects", rows, column_names=columns)
    replayed = [[*row[:5], 9, row[6]] for row in rows]
    client.insert("billing.usage_rejects", replayed, column_names=columns)
    unreadable: list[list[object]] = [["", 0, "", "usage", 0, offset, "not JSON"] for offset in (6, 7, 7)]
    client.insert("billing.usage_rejects", unreadable, column_names=columns)
    assert client.command("SELECT count() FROM billing.open_rejects") == 4
    client.insert(
        "billing.usage_rejects",
        [[*rows[0], "finance", NOW]],
        column_names=[*columns, "resolved_by", "resolved_at"],
    )
    client.insert("billing.usage_rejects", rows, column_names=columns)
    assert client.query(
        "SELECT batch_id, request_index FROM billing.open_rejects WHERE batch_id != ''"
    ).result_rows == [("b", 1)]


def test_days_for_charts(client: Any) -> None:
    month = int(datetime.now(UTC).strftime("%Y%m"))
    _insert(client, [_row(n, offset=n, month=month) for n in range(5)])
    client.command("SYSTEM REFRESH VIEW billing.usage_daily_refresh")
    client.command("SYSTEM WAIT VIEW billing.usage_daily_refresh")
    days = client.query(
        "SELECT day, tier, api_key_id, requests, cost_nano_usd FROM billing.usage_daily FINAL"
    ).result_rows
    assert days == [(NOW.date(), "standard", "key_1", 5, 4_000)]
