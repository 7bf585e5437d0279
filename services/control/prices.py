"""Prices: what a batch would pay now, and the record of what prices there were.

A batch carries its own price, so nothing is computed from the record; it is what finance reads to explain an
invoice. It is append-only: a row is added when the settings of this start differ from the newest row.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

import msgspec
from clickhouse_connect.driver.exceptions import ClickHouseError

from schemas.facts import Priority
from schemas.money import Price
from schemas.settings import Settings
from services.warehouse.client import connect
from streams.core import pricing

RETRY_S = 5.0
COLUMNS = [
    "price_id", "model", "tier", "input_nano_per_mtok", "cached_nano_per_mtok", "output_nano_per_mtok", "bps",
    "valid_from", "created_by",
]  # fmt: skip

log = logging.getLogger("openrelay.control")


class PriceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model and priority: the Sync rate in nano-USD per million tokens, and the share of it in bps."""

    model: str
    tier: str
    price_id: str
    input_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    bps: int


def current(settings: Settings) -> list[PriceRow]:
    """By model, standard first."""
    return [
        _row(name, priority, pricing.price(name, model, priority))
        for name, model in sorted(settings.models.items())
        for priority in Priority
    ]


async def keep_recorded(settings: Settings) -> None:
    """Record the current prices, as soon as the warehouse takes them."""
    while True:
        try:
            added = await asyncio.to_thread(record, settings, datetime.now(UTC))
        except ClickHouseError as error:
            log.warning("prices are not recorded yet: %s", str(error).splitlines()[0][:300])
            await asyncio.sleep(RETRY_S)
        else:
            log.info("prices recorded: %d new", added)
            return


def record(settings: Settings, now: datetime) -> int:
    """Add what differs from the newest rows; how many. Blocks; raises the ClickHouse client's errors.

    Two control hosts that start at once may both add a row: the later one says the same again.
    """
    client = connect(settings.clickhouse)
    try:
        known = {
            (model, tier): price_id
            for model, tier, price_id in client.query(
                "SELECT model, tier, argMax(price_id, valid_from) FROM billing.prices GROUP BY model, tier"
            ).result_rows
        }
        rows = [
            [
                row.price_id,
                row.model,
                row.tier,
                row.input_nano_usd_per_mtok,
                row.cached_input_nano_usd_per_mtok,
                row.output_nano_usd_per_mtok,
                row.bps,
                now,
                "settings",
            ]
            for row in current(settings)
            if known.get((row.model, row.tier)) != row.price_id
        ]
        if rows:
            client.insert("billing.prices", rows, column_names=COLUMNS, settings={"async_insert": 0})
        return len(rows)
    finally:
        client.close()


def _row(model: str, priority: Priority, price: Price) -> PriceRow:
    return PriceRow(
        model=model,
        tier=priority.value,
        price_id=price.price_id,
        input_nano_usd_per_mtok=price.input_nano_usd_per_mtok,
        cached_input_nano_usd_per_mtok=price.cached_input_nano_usd_per_mtok,
        output_nano_usd_per_mtok=price.output_nano_usd_per_mtok,
        bps=price.bps,
    )
