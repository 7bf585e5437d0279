"""What must be true of every ended batch, whatever happened on the way."""

from __future__ import annotations

from collections import Counter
from typing import Any

from schemas.facts import Created
from schemas.money import Usage
from streams.core import pricing
from streams.core.lifecycle import BatchState


def check_batch(
    state: BatchState, custom_ids: list[str], output: list[dict[str, Any]], error: list[dict[str, Any]]
) -> None:
    """Counts add up, each record has one line in one file, in input order; the bill is that of the lines."""
    created, settled = state.created, state.settled
    assert created is not None
    assert settled is not None
    assert settled.completed + settled.failed == created.total == len(custom_ids)
    assert (len(output), len(error)) == (settled.completed, settled.failed)
    assert Counter(line["custom_id"] for line in [*output, *error]) == Counter(custom_ids)
    place = {custom_id: i for i, custom_id in enumerate(custom_ids)}
    for lines in (output, error):
        order = [place[line["custom_id"]] for line in lines]
        assert order == sorted(order), "lines are not in input order"
    usage, cost = billed(created, [*output, *error])
    assert (settled.usage.input, settled.usage.cached, settled.usage.output) == usage
    assert settled.usage.cost_nano_usd == cost


def billed(created: Created, lines: list[dict[str, Any]]) -> tuple[tuple[int, int, int], int]:
    """Input, cached and output tokens, and cost, recomputed from the lines of the result files.

    A workflow's line says what its requests add up to, whether or not it failed; of the others those bill
    that have an answer.
    """
    totals = [0, 0, 0]
    cost = 0
    for line in lines:
        body = (line["response"] or {}).get("body")
        answer = body if isinstance(body, dict) else {}
        workflow = line.get("openrelay") or answer.get("openrelay") or {}
        if "workflow_steps" in workflow:
            summed = workflow["usage"]
            cost += summed["cost_nano_usd"]
            counts = (
                summed["input_tokens"],
                summed["input_tokens_details"]["cached_tokens"],
                summed["output_tokens"],
            )
        elif line["error"] is None and _usable(answer.get("usage")):
            reported = answer["usage"]
            cached = (reported.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            usage = Usage(reported["prompt_tokens"], reported["completion_tokens"], cached)
            cost += sum(pricing.cost_parts(usage, created.price))
            counts = (usage.input, usage.cached, usage.output)
        else:
            continue
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    return (totals[0], totals[1], totals[2]), cost


def check_ledger(client: Any, state: BatchState) -> None:
    """ClickHouse has the same integers as the batch, and no billed call twice."""
    assert state.settled is not None
    assert state.created is not None
    usage = state.settled.usage
    (row,) = client.query(
        "SELECT count() - uniqExact(request_index, entry_id), uniqExact(request_index),"
        " sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(cost_nano_usd)"
        " FROM billing.usage WHERE batch_id = {batch:String}",
        parameters={"batch": state.created.batch},
    ).result_rows
    assert row == (
        0,
        usage.billed_records,
        usage.input,
        usage.cached,
        usage.output,
        usage.cost_nano_usd,
    )


def _usable(reported: Any) -> bool:
    return isinstance(reported, dict) and all(
        type(reported.get(name)) is int and 0 <= reported[name] <= 1 << 40
        for name in ("prompt_tokens", "completion_tokens")
    )
