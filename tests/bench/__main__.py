"""`make bench`: figures to read, nothing asserted. `python -m tests.bench NAME …` runs some of them."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tests.bench import api, neighbours, run, tools

BENCHES: dict[str, Callable[[int], list[tuple[str, str, str]]]] = {
    "throughput": run.throughput,
    "two-dispatchers": run.two_dispatchers,
    "creation": run.creation,
    "checking": api.checking,
    "requests": api.requests,
    "large-read-model": api.large_read_model,
    "utilisation": run.utilisation,
    "in-flight": run.in_flight,
    "neighbours": neighbours.beside_a_large_batch,
    "recovery": neighbours.recovery,
    "many-batches": neighbours.many_batches,
    "tools": tools.rounds_of_tools,
    "waiting": tools.beside_waiting_records,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmarks on a stack of their own, with a simulated pool.")
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(BENCHES)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each; the median is shown")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(BENCHES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    console = Console(width=150)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    console.print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores shared by everything, "
        f"{memory:.0f} GiB, Python {platform.python_version()}; "
        f"medians of {chosen.rounds}; records of 700 bytes"
    )
    for name in chosen.names or BENCHES:
        table = Table(title=name, title_justify="left")
        for column in ("measured", "figure", "rounds"):
            table.add_column(column, overflow="fold")
        for row in BENCHES[name](chosen.rounds):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
