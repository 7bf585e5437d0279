"""What a result costs, in integer nano-USD."""

import hashlib
from datetime import UTC, datetime

from schemas.facts import Priority
from schemas.money import Price, Usage
from schemas.settings import Model

BPS = {Priority.STANDARD: 5_000, Priority.EXPEDITED: 10_000}
"""Share of the Sync rate by priority, in basis points."""

_PER = 10_000_000_000
"""A million tokens times ten thousand basis points."""


def price(model_name: str, model: Model, priority: Priority) -> Price:
    """The price a batch of `model_name` gets at its creation; equal inputs have equal ids."""
    bps = BPS[priority]
    cached = model.cached_input_nano_usd_per_mtok
    rates = (
        model.input_nano_usd_per_mtok,
        model.input_nano_usd_per_mtok if cached is None else cached,
        model.output_nano_usd_per_mtok,
    )
    text = "\n".join([model_name, priority.value, *map(str, rates), str(bps)])
    price_id = "price_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    return Price(price_id, *rates, bps)


def cost_parts(usage: Usage, price: Price) -> tuple[int, int]:
    """Cost of input (fresh and cached) and of output.

    Each class of tokens is rounded half up once: `(tokens * price * bps + 5e9) div 1e10`.
    """
    fresh = _rounded(usage.input - usage.cached, price.input_nano_usd_per_mtok, price.bps)
    cached = _rounded(usage.cached, price.cached_input_nano_usd_per_mtok, price.bps)
    return fresh + cached, _rounded(usage.output, price.output_nano_usd_per_mtok, price.bps)


def billing_month(created_at_ms: int) -> int:
    """The month in which a batch is billed: UTC month of its creation, YYYYMM."""
    created = datetime.fromtimestamp(created_at_ms / 1000, tz=UTC)
    return created.year * 100 + created.month


def _rounded(tokens: int, nano_per_mtok: int, bps: int) -> int:
    return (tokens * nano_per_mtok * bps + _PER // 2) // _PER
