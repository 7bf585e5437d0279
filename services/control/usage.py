"""Usage and cost of organizations, read from the view that finance reads."""

from __future__ import annotations

from datetime import date
from typing import NamedTuple

import msgspec

from schemas.settings import ClickHouse
from services.api.refusals import invalid
from services.warehouse.client import connect

DIMENSIONS = {
    "day": "toString(toDate(completed_at))",
    "month": "billing_month",
    "model": "model",
    "batch": "batch_id",
    "api_key": "api_key_id",
    "tier": "tier",
    "organization": "org_id",
}
"""What usage may be grouped by, and the column behind it."""

MAX_ROWS = 10_000


class Question(NamedTuple):
    """`organization` None: all of them. Days are inclusive, UTC."""

    organization: str | None
    group_by: tuple[str, ...]
    start: str | None
    end: str | None
    batch: str | None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group; the dimensions that were not asked for are absent."""

    day: str | None = None
    month: int | None = None
    model: str | None = None
    batch: str | None = None
    api_key: str | None = None
    tier: str | None = None
    organization: str | None = None
    requests: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cost_nano_usd: int | None = None


class Warehouse:
    """Blocking reads, one connection a call: any worker thread may ask."""

    def __init__(self, clickhouse: ClickHouse) -> None:
        self._clickhouse = clickhouse

    def usage(self, question: Question) -> list[UsageRow]:
        """Raises the ClickHouse client's errors."""
        sql, parameters = _sql(question)
        client = connect(self._clickhouse)
        try:
            result = client.query(sql, parameters=parameters)
            return [UsageRow(**row) for row in result.named_results()]
        finally:
            client.close()


def question(parameters: dict[str, str], organization: str | None) -> Question:
    """From query parameters; raises Refusal naming the one that is wrong."""
    known = {"group_by", "start", "end", "batch", "organization"}
    for name in parameters:
        if name not in known:
            raise invalid(f"unknown parameter {name}", name)
    group_by = tuple(dict.fromkeys(filter(None, parameters.get("group_by", "model").split(","))))
    for dimension in group_by:
        if dimension not in DIMENSIONS:
            raise invalid(f"group_by: choose from {', '.join(DIMENSIONS)}", "group_by")
    for name in ("start", "end"):
        _check_day(name, parameters.get(name))
    return Question(
        organization=organization,
        group_by=group_by,
        start=parameters.get("start"),
        end=parameters.get("end"),
        batch=parameters.get("batch"),
    )


def _check_day(name: str, value: str | None) -> None:
    if value is not None:
        try:
            msgspec.convert(value, date)
        except msgspec.ValidationError:
            raise invalid(f"{name}: must be a day, YYYY-MM-DD", name) from None


def _sql(question: Question) -> tuple[str, dict[str, str]]:
    conditions, parameters = ["kind = 'usage'"], {}
    for name, column in (("organization", "org_id"), ("batch", "batch_id")):
        value = getattr(question, name)
        if value is not None:
            conditions.append(f"{column} = {{{name}:String}}")
            parameters[name] = value
    for name, comparison in (("start", ">="), ("end", "<=")):
        value = getattr(question, name)
        if value is not None:
            conditions.append(f"toDate(completed_at) {comparison} {{{name}:Date}}")
            parameters[name] = value
    groups = [f"{DIMENSIONS[name]} AS {name}" for name in question.group_by]
    sums = [
        "count() AS requests",
        *(
            f"toInt64(sum(toInt128(u.{column}))) AS {column}"
            for column in ("input_tokens", "cached_tokens", "output_tokens", "cost_nano_usd")
        ),
    ]
    grouping = (
        f" GROUP BY {', '.join(question.group_by)} ORDER BY {', '.join(question.group_by)}" if groups else ""
    )
    sql = (
        f"SELECT {', '.join([*groups, *sums])} FROM billing.usage AS u WHERE {' AND '.join(conditions)}"
        f"{grouping} LIMIT {MAX_ROWS}"
    )
    return sql, parameters
