"""One partition of `results` and the batches whose verdicts are given there."""

from __future__ import annotations

from schemas.facts import Settled
from schemas.ids import BatchId
from schemas.money import UsageTotals
from schemas.records import Ledger, UsageChunk, UsageRow
from streams.core.verdicts import Spec, Tally

STALE_LEDGER_OFFSETS = 20_000
"""An open batch whose ledger lies further back is written again: a restart reads no more than this."""

ROWS_PER_CHUNK = 500


class Partition:
    """State between two flushes. Offsets are those of this partition of `results`."""

    def __init__(self, number: int, ledgers: dict[BatchId, Ledger]) -> None:
        self.number = number
        self.position = 0
        self.specs: dict[BatchId, Spec] = {}
        self.tallies: dict[BatchId, Tally] = {}
        self.touched: set[BatchId] = set()
        self.usage: dict[BatchId, list[UsageRow]] = {}
        self.settled: list[Settled] = []
        self._ledgers = ledgers
        self._written_at: dict[BatchId, int] = {b: ledger.upto for b, ledger in ledgers.items()}

    def start(self, committed: int, open_batches: set[BatchId]) -> int:
        """Where to read from: nothing that an open batch's ledger lacks, or only names, is passed over."""
        needed = [
            offset
            for batch, ledger in self._ledgers.items()
            if batch in open_batches
            for offset in (ledger.upto, *ledger.steps.values())
        ]
        self.position = min([committed, *needed])
        return self.position

    def known(self, batch: BatchId) -> bool:
        return batch in self.tallies

    def open(self, spec: Spec) -> Tally:
        """The arbiter's state of a batch, from its ledger when it has one."""
        batch = spec.created.batch
        ledger = self._ledgers.pop(batch, None)
        tally = Tally(spec) if ledger is None else Tally.restore(spec, ledger)
        self.specs[batch] = spec
        self.tallies[batch] = tally
        return tally

    def drop(self, batch: BatchId) -> bool:
        """The batch has ended; whether it ever had a ledger."""
        self.specs.pop(batch, None)
        self.tallies.pop(batch, None)
        self.touched.discard(batch)
        self._ledgers.pop(batch, None)
        return self._written_at.pop(batch, None) is not None

    def ledgers_due(self) -> list[Ledger]:
        """Ledgers of the batches that changed, and of idle ones whose ledger has fallen far behind."""
        due = []
        for batch, tally in self.tallies.items():
            behind = self.position - self._written_at.get(batch, self.position)
            if batch in self.touched or (not tally.settled and behind > STALE_LEDGER_OFFSETS):
                tally.upto = max(tally.upto, self.position)
                self._written_at[batch] = tally.upto
                due.append(tally.ledger(self.specs[batch]))
        return due

    def usage_chunks(self) -> list[UsageChunk]:
        chunks = []
        for batch, rows in self.usage.items():
            created = self.specs[batch].created
            for start in range(0, len(rows), ROWS_PER_CHUNK):
                chunks.append(
                    UsageChunk(
                        organization=created.organization,
                        billing_month=self.specs[batch].billing_month,
                        batch=batch,
                        model=created.model or "",
                        endpoint=created.endpoint,
                        tier=created.priority.value,
                        api_key_id=created.api_key_id,
                        price_id=created.price.price_id,
                        rows=rows[start : start + ROWS_PER_CHUNK],
                    )
                )
        self.usage = {}
        return chunks

    def totals(self, batch: BatchId) -> tuple[int, int, int, UsageTotals]:
        """`upto`, completed, failed and usage, for a progress report."""
        tally = self.tallies[batch]
        return tally.upto, tally.completed, tally.failed, tally.usage
