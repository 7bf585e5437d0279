"""An audit's report in words."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.output import money
from services.operator.audit import Report
from services.operator.whereabouts import Whereabouts


def lines(report: Report) -> Iterator[str]:
    yield f"{report.batch} of {report.organization}: {report.status}"
    yield (
        f"records   {report.total} in the input, {report.rejected} rejected at create; "
        f"{report.completed} completed, {report.failed} failed; cost {money(report.cost_nano_usd)}"
    )
    if report.whereabouts is not None:
        yield from _whereabouts(report.whereabouts)
    elif report.good and report.unproven:
        yield "agrees    facts, counts and usage of the batch and ClickHouse agree"
    elif report.good:
        yield "good      each record is in exactly one place; files, batch and ClickHouse agree"
    else:
        yield f"NOT GOOD  {report.fault_count} faults"
    for fault in report.faults:
        yield f"  {fault}"
    if report.fault_count > len(report.faults):
        yield f"  … and {report.fault_count - len(report.faults)} more"
    for each in report.unproven:
        yield f"unproven  {each}: they cannot be compared any more"
    for note in report.notes:
        yield f"note      {note}"


def _whereabouts(found: Whereabouts) -> Iterator[str]:
    if found.laid_out is None:
        yield f"intake    {found.accepted} accepted, not yet laid out"
    else:
        yield f"intake    {found.accepted} accepted, {found.laid_out} laid out in {found.topic}"
    yield f"dispatch  {found.finished} finished"
    for lane in found.lanes:
        more = f", {lane.crashes} crashes" if lane.crashes else ""
        more += "" if lane.probing is None else f", position {lane.probing} runs alone"
        yield (
            f"          partition {lane.partition}: {lane.records} records, "
            f"started below {lane.started_upto}, {lane.finished} finished, "
            f"moved {lane.idle_s:.1f} s ago{more}"
        )
    yield f"settle    {found.verdicts} verdicts, {found.results_waiting} results waiting"
    yield f"sink      {found.output_lines} output lines, {found.error_lines} error lines"
    if found.settled:
        yield "          settled; the files are being made"
    for stuck in found.stuck:
        named = ", ".join(map(str, stuck.indices)) + (", …" if stuck.count > len(stuck.indices) else "")
        yield f"STUCK     {stuck.count} records ({named}): {stuck.said}"
