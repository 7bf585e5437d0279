"""What `orl` prints: results on standard output, everything said to a person on standard error.

Progress bars appear on a terminal only. Text that came from a server is never taken for markup, and its
control characters, which could steer a terminal, are shown as `?`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from schemas.batches import Batch


def say(sentence: str) -> None:
    """A line on standard error."""
    print(_printable(sentence), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def print_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on a terminal; lines of tab-separated values, without a head, elsewhere."""
    cells = [[_printable(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in cells:
            print("\t".join(row))
        return
    table = Table(*names, box=None, header_style="bold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def local_time(at_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))


def tell_more(page: dict[str, Any]) -> None:
    """Say how to see the next page of a list, if there is one."""
    if page.get("has_more"):
        say(f"there are more: --after {page['last_id']}")


def money(nano_usd: int) -> str:
    """Dollars with as many decimals as are needed, at least two: the sum is exact."""
    sign, nano = ("-" if nano_usd < 0 else ""), abs(nano_usd)
    decimals = f"{nano % 10**9:09d}".rstrip("0").ljust(2, "0")
    return f"{sign}${nano // 10**9}.{decimals}"


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes; the function it gives hears how many are done, and how many there are."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    name = TextColumn("{task.description}", table_column=Column(max_width=30, no_wrap=True))
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_terminal(), transient=True) as progress:
        task = progress.add_task(_printable(what), total=total or None)
        yield lambda done, of: progress.update(task, completed=done, total=of or None)


@contextmanager
def batch_bar() -> Iterator[Callable[[Batch], None]]:
    """A bar for a batch that runs; off a terminal, a line for each new status."""
    if not sys.stderr.isatty():
        yield _status_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, console=_terminal(), transient=True) as progress:
        task = progress.add_task("", total=None, counts="")

        def show(batch: Batch) -> None:
            counts = batch.request_counts
            progress.update(
                task,
                description=batch.status,
                total=counts.total or None,
                completed=counts.completed + counts.failed,
                counts=f"{counts.completed} completed, {counts.failed} failed, {counts.total} in total",
            )

        yield show


def _status_lines() -> Callable[[Batch], None]:
    last = ""

    def show(batch: Batch) -> None:
        nonlocal last
        if batch.status != last:
            last = batch.status
            counts = batch.request_counts
            say(f"{batch.id} {last}: {counts.completed} completed, {counts.failed} failed of {counts.total}")

    return show


def _terminal() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\t" else "?" for char in text)
