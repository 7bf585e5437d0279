"""The bill of a batch three times over: from its lines, as it was settled, and as ClickHouse has it."""

from __future__ import annotations

from typing import Any

from schemas.facts import Ended
from services.operator.faults import Faults
from services.operator.result_files import Charge
from streams.core.pricing import billing_month

SETTLED, WAREHOUSE = "usage of the batch", "ClickHouse"


def compare_settled(ended: Ended, charges: dict[int, Charge], faults: Faults) -> None:
    """The batch object's usage is the sum over the lines."""
    usage = ended.settled.usage
    for name, found, column in (
        ("input tokens", usage.input, "input"),
        ("cached tokens", usage.cached, "cached"),
        ("output tokens", usage.output, "output"),
        ("reasoning tokens", usage.reasoning, "reasoning"),
        ("cost in nano-USD", usage.cost_nano_usd, "cost_nano_usd"),
        ("unmetered requests", usage.unmetered_requests, "unmetered"),
    ):
        total = sum(getattr(charge, column) for charge in charges.values())
        faults.compare(SETTLED, name, found, total)


def compare_warehouse(client: Any, ended: Ended, charges: dict[int, Charge] | None, faults: Faults) -> None:
    """The view finance reads says what the lines say, record by record, and in sum what was settled.

    Without `charges`, because lines are gone, only the sums can be compared. Raises the client's errors.
    """
    created, usage = ended.created, ended.settled.usage
    rows = client.query(
        "SELECT request_index, count(), sum(input_tokens), sum(cached_tokens), sum(output_tokens),"
        " sum(cost_nano_usd), groupUniqArray(price_id), groupUniqArray(org_id), groupUniqArray(billing_month)"
        " FROM billing.usage WHERE batch_id = {batch:String} AND kind = 'usage' GROUP BY request_index",
        parameters={"batch": created.batch},
    ).result_rows
    identity = ([created.price.price_id], [created.organization], [billing_month(ended.created_at_ms)])
    for index, *_, prices, organizations, months in rows:
        found = (prices, organizations, months)
        faults.compare(WAREHOUSE, "price, organization, month", found, identity, index)
        if not 0 <= index < created.total:
            faults.add(WAREHOUSE, "is billed and is no record of the batch", index)
    if charges is not None:
        _compare_records(rows, charges, faults)
    else:
        sums = [sum(row[column] for row in rows) for column in range(2, 6)]
        settled = [usage.input, usage.cached, usage.output, usage.cost_nano_usd]
        faults.compare(WAREHOUSE, "sum of [input, cached, output, cost]", sums, settled)
    faults.compare(WAREHOUSE, "number of billed records", len(rows), usage.billed_records)
    _compare_rejects(client, ended, faults)
    _compare_batch(client, ended, faults)


def _compare_records(rows: list[Any], charges: dict[int, Charge], faults: Faults) -> None:
    billed = {index: charge for index, charge in charges.items() if charge.rows != 0}
    for index, count, *sums, _, _, _ in rows:
        charge = billed.pop(index, None)
        if charge is None:
            faults.add(WAREHOUSE, f"has {count} rows and its line bills nothing", index)
            continue
        told = [charge.input, charge.cached, charge.output, charge.cost_nano_usd]
        faults.compare(WAREHOUSE, "[input, cached, output, cost]", sums, told, index)
        if charge.rows is not None:
            faults.compare(WAREHOUSE, "number of rows", count, charge.rows, index)
    for index, charge in billed.items():
        # A workflow whose every request went without usage has a report and no row.
        if charge.rows is not None or charge.cost_nano_usd or charge.input or charge.output:
            faults.add(WAREHOUSE, "is billed by its line and has no row", index)


def _compare_rejects(client: Any, ended: Ended, faults: Faults) -> None:
    """Answers without usable usage are listed for people, once each, resolved since or not."""
    found = client.query(
        "SELECT count() FROM billing.usage_rejects FINAL"
        " WHERE batch_id = {batch:String} AND reason = 'unmetered'",
        parameters={"batch": ended.batch},
    ).first_row[0]
    faults.compare(WAREHOUSE, "number of unmetered requests", found, ended.settled.usage.unmetered_requests)


def _compare_batch(client: Any, ended: Ended, faults: Faults) -> None:
    rows = client.query(
        "SELECT status, total, completed, failed, cost_nano_usd FROM billing.batches FINAL"
        " WHERE batch_id = {batch:String}",
        parameters={"batch": ended.batch},
    ).result_rows
    settled = ended.settled
    expected = (
        ended.status,
        ended.created.total,
        settled.completed,
        settled.failed,
        settled.usage.cost_nano_usd,
    )
    found = tuple(rows[0]) if rows else None
    faults.compare(WAREHOUSE, "row of the batch (status, total, completed, failed, cost)", found, expected)
