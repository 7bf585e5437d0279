"""Waiting for a batch, and telling how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from schemas.batches import TERMINAL, Batch
from services.cli.client import Client, Exit, Trouble, route
from services.cli.output import money, say

SHORTEST_POLL_S = 0.5
LONGEST_POLL_S = 30.0
SHOWN = 20
"""Rejected or failed records that are named one by one; the rest is counted."""

_TERMINAL = frozenset(status.value for status in TERMINAL)


def read_batch(value: dict[str, Any]) -> Batch:
    """A batch object as a struct. Raises `Trouble` if it is none."""
    try:
        return msgspec.convert(value, Batch)
    except msgspec.ValidationError as fault:
        raise Trouble(f"The server sent something that is not a batch: {fault}.", Exit.NETWORK) from fault


def is_terminal(batch: Batch) -> bool:
    return batch.status in _TERMINAL


def wait(client: Client, value: dict[str, Any], show: Callable[[Batch], None]) -> dict[str, Any]:
    """Ask until the batch has ended; its last object.

    Asks often at first and then ever less: the pause is a twentieth of the time waited so far, so the end
    is seen late by at most that. Trouble on the way is the client's to sit out.
    """
    started_s = time.monotonic()
    batch = read_batch(value)
    while not is_terminal(batch):
        show(batch)
        waited_s = time.monotonic() - started_s
        time.sleep(min(max(waited_s / 20, SHORTEST_POLL_S), LONGEST_POLL_S))
        value = client.get(route("batches", batch.id))
        batch = read_batch(value)
    return value


def exit_status(batch: Batch) -> Exit:
    """What the command that saw the batch end returns."""
    if batch.status in ("expired", "cancelled"):
        return Exit.STOPPED
    return Exit.FAILED_RECORDS if batch.status == "failed" or batch.request_counts.failed else Exit.OK


def tell_rejected(batch: Batch) -> None:
    """Name the records that were refused when the batch was created."""
    rejected = batch.errors.data if batch.errors is not None else []
    for error in rejected[:SHOWN]:
        name = "" if error.custom_id is None else f" ({error.custom_id})"
        say(f"rejected: line {error.line}{name}: {error.message} [{error.code}]")
    if len(rejected) > SHOWN:
        say(f"rejected: {len(rejected) - SHOWN} more, listed in the batch object and in its error file")


def tell_end(batch: Batch) -> None:
    """One line about a batch that has ended."""
    counts, usage = batch.request_counts, batch.usage
    say(
        f"{batch.id} {batch.status}: {counts.completed} completed, {counts.failed} failed of {counts.total}; "
        f"{usage.input_tokens} input and {usage.output_tokens} output tokens, {money(usage.cost_nano_usd)}"
    )
