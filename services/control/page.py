"""The dashboard: one page of HTML that needs nothing else, neither scripts nor files, and renews itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from schemas.batches import Status
from services.cli.output import money
from services.control.board import BUCKET_MS, Row
from services.control.overview import ROWS, Overview

RENEW_S = 5
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}

_STYLE = resources.files("services.control").joinpath("page.css").read_text("utf-8")

_STATUS_CLASS = {
    Status.COMPLETED: "good",
    Status.FAILED: "bad",
    Status.EXPIRED: "bad",
    Status.CANCELLED: "warn",
    Status.CANCELLING: "warn",
}


def page(found: Overview) -> str:
    """Everything that came from outside is escaped."""
    whose = "all organizations" if found.organization is None else f"organization {found.organization}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{RENEW_S}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>OpenRelay Batch</title>
<style>{_STYLE}</style></head><body><main>
<header><h1>OpenRelay Batch</h1><span class="soft">{escape(whose)}</span>
<span class="soft">{_clock(found.now_ms)} UTC, renewed every {RENEW_S} s</span></header>
{_tiles(found)}
<section class="card"><h2>Records per second, last {len(found.verdicts) * BUCKET_MS // 60_000} minutes</h2>
{_chart(found.verdicts)}</section>
<section class="card"><h2>Open batches</h2>{_batches(found.open, found.now_ms, "Created")}</section>
<div class="two">
<section class="card"><h2>Model servers</h2>{_endpoints(found)}</section>
<section class="card"><h2>Lag</h2>{_lags(found)}</section>
</div>
<section class="card"><h2>Ended lately</h2>{_batches(found.latest, found.now_ms, "Ended")}</section>
<section class="card roles"><h2>Processes</h2>{_roles(found)}</section>
</main></body></html>
"""


def _tiles(found: Overview) -> str:
    in_flight = sum(endpoint.in_flight for endpoint in found.endpoints)
    slots = sum(endpoint.slots for endpoint in found.endpoints)
    trouble = ", ".join(f"{count:,} {_words(kind)}" for kind, count in found.trouble.items() if count)
    statuses = [(_words(status.value), count) for status, count in found.by_status.items() if count]
    tiles = [
        ("records/s, last minute", f"{found.per_second:,.1f}", ""),
        ("records to do", f"{found.waiting:,}", ""),
        ("calls in flight", f"{in_flight:,}", f"of {slots:,} slots"),
        ("calls without an answer", f"{sum(found.trouble.values()):,}", trouble),
        ("records stuck", f'<span class="{"bad" if found.stuck else ""}">{found.stuck:,}</span>', ""),
        ("batches open", f"{len(found.open):,}", ", ".join(f"{n:,} {name}" for name, n in statuses)),
    ]
    cards = (
        f'<div class="card tile"><span class="soft">{name}</span><b>{value}</b>'
        f'<span class="soft">{escape(more)}</span></div>'
        for name, value, more in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def _chart(verdicts: Sequence[int]) -> str:
    highest = max([*verdicts, 1])
    bars = "".join(
        f'<rect x="{place * 10 + 1}" y="{60 - height:.1f}" width="8" height="{height:.1f}">'
        f"<title>{count * 1000 / BUCKET_MS:,.1f} records/s</title></rect>"
        for place, count in enumerate(verdicts)
        if (height := 58 * count / highest)
    )
    return (
        f'<svg viewBox="0 0 {len(verdicts) * 10} 60" preserveAspectRatio="none" role="img">{bars}</svg>'
        f'<span class="soft">highest {highest * 1000 / BUCKET_MS:,.1f}</span>'
        if any(verdicts)
        else '<span class="soft">nothing was finished in this time</span>'
    )


def _batches(rows: Sequence[Row], now_ms: int, since: str) -> str:
    names = ["Batch", "Status", "Progress", "", "Failed", "Organization", "Model", "Priority", "Cost", since]
    shown = _table(
        names,
        (
            [
                f"<code>{escape(row.batch)}</code>",
                f'<span class="{_STATUS_CLASS.get(row.status, "")}">{_words(row.status.value)}</span>',
                f'<meter max="{max(row.total, 1)}" value="{row.completed + row.failed}"></meter>',
                f"{row.completed + row.failed:,} of {row.total:,}",
                f'<span class="{"bad" if row.failed else "soft"}">{row.failed:,}</span>',
                escape(row.organization),
                escape(row.model),
                escape(row.priority),
                money(row.cost_nano_usd),
                _age(now_ms - (row.ended_at_ms or row.created_at_ms)),
            ]
            for row in rows[:ROWS]
        ),
        numbers={3, 4, 8, 9},
    )
    more = f'<p class="soft">and {len(rows) - ROWS:,} more</p>' if len(rows) > ROWS else ""
    return shown + more if rows else '<span class="soft">none</span>'


def _endpoints(found: Overview) -> str:
    if not found.endpoints:
        return '<span class="soft">no dispatcher shows any</span>'
    return _table(
        ["Model", "Server", "State", "In flight", "Limit", "Most"],
        (
            [
                escape(each.model),
                f"<code>{escape(each.address)}</code>",
                '<span class="bad">out</span>' if each.out else '<span class="good">in service</span>',
                f"{each.in_flight:,}",
                f"{each.slots:,}",
                f"{each.max_slots:,}",
            ]
            for each in found.endpoints
        ),
        numbers={3, 4, 5},
    )


def _lags(found: Overview) -> str:
    if found.lags is None:
        return '<span class="bad">the broker does not answer</span>'
    rows = ([escape(lag.group), f"<code>{escape(lag.topic)}</code>", f"{lag.lag:,}"] for lag in found.lags)
    return _table(["Group", "Topic", "Records behind"], rows, numbers={2})


def _roles(found: Overview) -> str:
    if not found.roles:
        return '<span class="soft">none is known here</span>'
    return "".join(
        f'<span><span class="good">●</span> {escape(role.name)} '
        f'<span class="soft">{_size(role.memory)}</span></span>'
        if role.up
        else f'<span class="bad">○ {escape(role.name)} is down</span>'
        for role in found.roles
    )


def _size(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 1e6:,.0f} MB"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: set[int]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{cell}</{tag}>' if place in numbers else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><tr>{line('th', names)}</tr>{body}</table>"


def _clock(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ms / 1000))


def _age(ms: int) -> str:
    seconds = max(0, ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _words(name: str) -> str:
    return name.replace("_", " ")
