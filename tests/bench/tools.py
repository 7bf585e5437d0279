"""What tools cost: rounds a second, the time a round adds, and what those who wait take from the others."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

from tests.bench.harness import MODEL, Rig, lines, median_of, rig, timed
from tests.support.customer import Customer
from tests.support.until import until

Row = tuple[str, str, str]

ROUNDS = 4
RECORDS = 1_000
WAITING = 1_000
PLAIN = 10_000


def rounds_of_tools(rounds: int) -> list[Row]:
    """Records of four rounds with instant tools, against as many calls of the model without tools."""
    rows: list[Row] = []
    with rig() as on, Customer() as customer:
        on.wait("org_a", on.create("org_a", lines(1_000)))
        calls = RECORDS * (ROUNDS + 1)
        bare = _median(on, rounds, lambda: lines(calls))
        rows.append((f"{calls:,} plain records, no tools", f"{calls / bare[0]:,.0f} calls/s", _each(bare[1])))
        for kind in ("http", "mcp"):
            url = f"{customer.url}/{'tools' if kind == 'http' else 'mcp'}"
            batch = _with_tools(RECORDS, ROUNDS, url, kind)
            median, every = _median(on, rounds, lambda: batch)  # noqa: B023
            count = RECORDS * ROUNDS
            rows.append((f"{count:,} rounds, {kind}", f"{count / median:,.0f} rounds/s", _each(every)))
            added_ms = (median - bare[0]) / count * 1000
            rows.append((f"added to a call by a round, {kind}, under load", f"{added_ms:.2f} ms", ""))
        for kind in ("http", "mcp"):
            url = f"{customer.url}/{'tools' if kind == 'http' else 'mcp'}"
            gap_ms = _gap_ms(on, customer, url, kind)
            rows.append((f"one record alone, from one round to the next, {kind}", f"{gap_ms:.1f} ms", ""))
    return rows


def beside_waiting_records(rounds: int) -> list[Row]:
    """Plain records alone, and beside 1,000 of another organization that wait for tools of 5 seconds.

    In turns, so that whatever else the machine does meets both alike.
    """
    rows: list[Row] = []
    with rig() as on, Customer() as customer:

        def plain() -> float:
            return timed(lambda: on.wait("org_a", on.create("org_a", lines(PLAIN))))

        def beside() -> float:
            waiting = on.create("org_b", _with_tools(WAITING, 1, f"{customer.url}/tools/slow/5", "http"))
            until(lambda: customer.running >= 250, 60, lambda: f"{customer.running} tools run")
            seconds = plain()
            on.wait("org_b", waiting)
            return seconds

        plain()
        pairs = [(plain(), beside()) for _ in range(rounds)]
        alone, together = (statistics.median(each) for each in zip(*pairs, strict=True))
        less = 100 * statistics.median(1 - a / b for a, b in pairs)
        rows.append(
            (
                f"{PLAIN:,} plain records alone",
                f"{PLAIN / alone:,.0f} records/s",
                _each([a for a, _ in pairs]),
            )
        )
        rows.append(
            (
                f"beside {WAITING:,} records that wait",
                f"{PLAIN / together:,.0f} records/s, {less:.0f} % less",
                _each([b for _, b in pairs]),
            )
        )
        rows.append(("tools running at once", f"{customer.peak:,}", ""))
        rows.append(("peak memory of the dispatcher", f"{on.memory()['dispatch']} MiB", ""))
    return rows


def _median(on: Rig, rounds: int, records: Callable[[], bytes]) -> tuple[float, list[float]]:
    return median_of(rounds, lambda: timed(lambda: on.wait("org_a", on.create("org_a", records()))))


def _gap_ms(on: Rig, customer: Customer, url: str, kind: str) -> float:
    """Median time between two calls of one record's executor: a call of the model, and all around it."""
    seen = len(customer.received)
    on.wait("org_a", on.create("org_a", _with_tools(1, 16, url, kind)))
    sent = [each for each in customer.received[seen:] if "initial" not in each.body.get("method", "")]
    return 1000 * statistics.median(b.at_s - a.at_s for a, b in itertools.pairwise(sent))


def _with_tools(count: int, rounds: int, url: str, kind: str) -> bytes:
    config: dict[str, Any] = {"tool_config": {"type": kind, "url": url, "max_rounds": rounds}}
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    made = []
    for i in range(count):
        message = {"role": "user", "content": f"tools:{rounds} bench {i} " + "x" * 400}
        body = {"model": MODEL, "messages": [message], "tools": [tool], "openrelay": config}
        record = {"custom_id": f"t{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(json.dumps(record))
    return ("\n".join(made) + "\n").encode()


def _each(seconds: list[float]) -> str:
    return ", ".join(f"{each:.2f} s" for each in seconds)
