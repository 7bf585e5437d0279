"""The bill of the demonstration, read in three places that know nothing of each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from schemas.batches import Batch
from schemas.money import Price, Usage
from streams.core.pricing import cost_parts

_QUERY = """
SELECT count(), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(cost_nano_usd)
FROM billing.usage WHERE batch_id = {batch:String} FORMAT TabSeparated
"""
_POLL_S = 0.2


class Bill(NamedTuple):
    """Billed requests, tokens, and cost in nano-USD."""

    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nano_usd: int


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


def of_batch(batch: Batch) -> Bill:
    """As the batch object has it."""
    usage = batch.usage
    return Bill(
        batch.request_counts.completed - usage.unmetered_requests,
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.cost_nano_usd,
    )


def of_file(path: Path, price: Price) -> Bill:
    """Added up again from the lines of the output file: tokens times price, rounded record by record."""
    bill = Bill(0, 0, 0, 0, 0)
    for usage in _usages(path):
        cost = sum(cost_parts(usage, price))
        line = (1, usage.input, usage.cached, usage.output, cost)
        bill = Bill(*(total + more for total, more in zip(bill, line, strict=True)))
    return bill


def of_warehouse(url: str, batch_id: str, requests: int, deadline_s: float = 60.0) -> Bill:
    """As finance sees it, in ClickHouse, once its rows have come or the deadline has passed."""
    end = time.monotonic() + deadline_s
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        while True:
            answer = client.post("/", params={"param_batch": batch_id}, content=_QUERY)
            answer.raise_for_status()
            bill = Bill(*map(int, answer.text.split()))
            if bill.requests >= requests or time.monotonic() > end:
                return bill
            time.sleep(_POLL_S)


def _usages(path: Path) -> Iterator[Usage]:
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        for line in file:
            usage = decoder.decode(line).response.body.usage
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            yield Usage(usage.prompt_tokens, usage.completion_tokens, cached)
