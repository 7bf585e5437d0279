"""Token usage and prices, as they travel between stages. Amounts are integer nano-USD."""

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Billable tokens of one accepted result. `cached` is part of `input`, `reasoning` part of `output`."""

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


class Price(msgspec.Struct, frozen=True):
    """What a batch pays, fixed when it is created.

    Prices are nano-USD per million tokens at the Sync rate; `bps` is the share of it that the
    batch's priority pays, in basis points (10,000 = the whole rate).
    """

    price_id: str
    input_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    bps: int


class UsageTotals(msgspec.Struct, frozen=True):
    """Sums over the accepted results of a batch."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0
    cost_nano_usd: int = 0
    unmetered_requests: int = 0
    billed_records: int = 0
